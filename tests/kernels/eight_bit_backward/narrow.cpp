// Kernels of heads of 64 dimensions: without a mask, and with every one.
#include "eight_bit_backward/kernels.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedEightBitBackward> narrow_eight_bit_backwards() {
  constexpr EightBitBackwardConfig full = narrow({});
  constexpr EightBitBackwardConfig any = narrow({.mask = {.causal = true, .local = true, .varlen = true}});
  static constexpr auto kernels = emulate<full, staggered(full),
                                          [](EightBitBackwardConfig c) {
                                            c.mask.causal = c.schedule.deterministic = c.f32_dq = true;
                                            return c;
                                          }(full),
                                          any>();
  return kernels;
}

}  // namespace tandem::kernel_tests
