#include "cpu/forward_kernels.hpp"

namespace tandem::cpu {

namespace portable {
extern const ForwardKernel forward_kernel;
}
namespace avx2 {
extern const ForwardKernel forward_kernel;
}
namespace avx512 {
extern const ForwardKernel forward_kernel;
}
namespace avx512_bf16 {
extern const ForwardKernel forward_kernel;
}
namespace neon {
extern const ForwardKernel forward_kernel;
}

const ForwardKernel& forward_kernel(Target target) {
  switch (target) {
#if defined(__x86_64__)
    case Target::avx2: return avx2::forward_kernel;
    case Target::avx512: return avx512::forward_kernel;
    case Target::avx512_bf16: return avx512_bf16::forward_kernel;
#elif defined(__aarch64__)
    case Target::neon: return neon::forward_kernel;
#endif
    default: return portable::forward_kernel;
  }
}

}  // namespace tandem::cpu
