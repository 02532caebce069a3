// The kernels of one instruction set. Compiled once for each (targets.cmake).
#include "cpu/targets/kernels.hpp"

namespace tandem::cpu::TANDEM_TARGET {

extern const ForwardKernel forward_kernel;
extern const ShortKernel short_kernel;
extern const BackwardKernel backward_kernel;
extern const QuantizeKernel quantize_kernel;
extern const EightBitKernel eight_bit_kernel;
extern const CacheKernel cache_kernel;

extern const Kernels all_kernels;
const Kernels all_kernels{.forward = forward_kernel,
                          .few_rows = short_kernel,
                          .backward = backward_kernel,
                          .quantize = quantize_kernel,
                          .eight_bit = eight_bit_kernel,
                          .cache = cache_kernel};

}  // namespace tandem::cpu::TANDEM_TARGET
