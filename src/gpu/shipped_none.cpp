// The shipped set of a build without NVRTC: empty.
#include "gpu/shipped.hpp"

namespace tandem::gpu {

__attribute__((weak)) std::span<const char> shipped_archive() {
  return {};
}

}  // namespace tandem::gpu
