#include "cpu/forward_kernels.hpp"

namespace tandem::cpu {

namespace portable {
extern const ForwardKernel forward_kernel;
extern const ShortKernel short_kernel;
}  // namespace portable
namespace avx2 {
extern const ForwardKernel forward_kernel;
extern const ShortKernel short_kernel;
}  // namespace avx2
namespace avx512 {
extern const ForwardKernel forward_kernel;
extern const ShortKernel short_kernel;
}  // namespace avx512
namespace avx512_bf16 {
extern const ForwardKernel forward_kernel;
extern const ShortKernel short_kernel;
}  // namespace avx512_bf16
namespace neon {
extern const ForwardKernel forward_kernel;
extern const ShortKernel short_kernel;
}  // namespace neon

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

const ShortKernel& short_kernel(Target target) {
  switch (target) {
#if defined(__x86_64__)
    case Target::avx2: return avx2::short_kernel;
    case Target::avx512: return avx512::short_kernel;
    case Target::avx512_bf16: return avx512_bf16::short_kernel;
#elif defined(__aarch64__)
    case Target::neon: return neon::short_kernel;
#endif
    default: return portable::short_kernel;
  }
}

}  // namespace tandem::cpu
