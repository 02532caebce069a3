#include "gpu/sources.hpp"

namespace tandem::gpu {

std::uint64_t device_sources_digest() {
  static const std::uint64_t digest = [] {
    std::uint64_t h = fnv_offset;
    for (const Source& source : device_sources()) {
      // The terminating zeros keep name and text apart.
      h = fnv1a({source.name, std::string_view(source.name).size() + 1}, h);
      h = fnv1a({source.text, std::string_view(source.text).size() + 1}, h);
    }
    return h;
  }();
  return digest;
}

}  // namespace tandem::gpu
