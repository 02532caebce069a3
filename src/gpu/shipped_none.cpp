// The shipped set of a build without NVRTC: empty.
#include "gpu/kernels.hpp"

namespace tandem::gpu {

std::span<const char> shipped_archive() {
  return {};
}

}  // namespace tandem::gpu
