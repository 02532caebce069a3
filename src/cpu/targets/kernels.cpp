#include "cpu/targets/kernels.hpp"

namespace tandem::cpu {

namespace portable {
extern const ForwardKernel forward_kernel;
extern const ShortKernel short_kernel;
extern const QuantizeKernel quantize_kernel;
extern const EightBitKernel eight_bit_kernel;
extern const CacheKernel cache_kernel;
}  // namespace portable
namespace avx2 {
extern const ForwardKernel forward_kernel;
extern const ShortKernel short_kernel;
extern const QuantizeKernel quantize_kernel;
extern const EightBitKernel eight_bit_kernel;
extern const CacheKernel cache_kernel;
}  // namespace avx2
namespace avx512 {
extern const ForwardKernel forward_kernel;
extern const ShortKernel short_kernel;
extern const QuantizeKernel quantize_kernel;
extern const EightBitKernel eight_bit_kernel;
extern const CacheKernel cache_kernel;
}  // namespace avx512
namespace avx512_bf16 {
extern const ForwardKernel forward_kernel;
extern const ShortKernel short_kernel;
extern const QuantizeKernel quantize_kernel;
extern const EightBitKernel eight_bit_kernel;
extern const CacheKernel cache_kernel;
}  // namespace avx512_bf16
namespace neon {
extern const ForwardKernel forward_kernel;
extern const ShortKernel short_kernel;
extern const QuantizeKernel quantize_kernel;
extern const EightBitKernel eight_bit_kernel;
extern const CacheKernel cache_kernel;
}  // namespace neon

namespace {

struct Kernels {
  const ForwardKernel& forward;
  const ShortKernel& brief;
  const QuantizeKernel& quantize;
  const EightBitKernel& eight_bit;
  const CacheKernel& cache;
};

Kernels kernels(Target target) {
  switch (target) {
#if defined(__x86_64__)
    case Target::avx2:
      return {avx2::forward_kernel, avx2::short_kernel, avx2::quantize_kernel, avx2::eight_bit_kernel,
              avx2::cache_kernel};
    case Target::avx512:
      return {avx512::forward_kernel, avx512::short_kernel, avx512::quantize_kernel, avx512::eight_bit_kernel,
              avx512::cache_kernel};
    case Target::avx512_bf16:
      return {avx512_bf16::forward_kernel, avx512_bf16::short_kernel, avx512_bf16::quantize_kernel,
              avx512_bf16::eight_bit_kernel, avx512_bf16::cache_kernel};
#elif defined(__aarch64__)
    case Target::neon:
      return {neon::forward_kernel, neon::short_kernel, neon::quantize_kernel, neon::eight_bit_kernel,
              neon::cache_kernel};
#endif
    default:
      return {portable::forward_kernel, portable::short_kernel, portable::quantize_kernel,
              portable::eight_bit_kernel, portable::cache_kernel};
  }
}

}  // namespace

const ForwardKernel& forward_kernel(Target target) {
  return kernels(target).forward;
}
const ShortKernel& short_kernel(Target target) {
  return kernels(target).brief;
}
const QuantizeKernel& quantize_kernel(Target target) {
  return kernels(target).quantize;
}
const EightBitKernel& eight_bit_kernel(Target target) {
  return kernels(target).eight_bit;
}
const CacheKernel& cache_kernel(Target target) {
  return kernels(target).cache;
}

}  // namespace tandem::cpu
