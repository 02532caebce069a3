// Kernels with every mask and any lengths, for the contract: beside those, what else a Config may have.
#include "eight_bit_backward/kernels.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedEightBitBackward> general_eight_bit_backwards() {
  constexpr EightBitBackwardConfig any{.mask = {.causal = true, .local = true, .varlen = true}};
  static constexpr auto kernels = emulate<any,
                                          [](EightBitBackwardConfig c) {
                                            c.tiling.element = Element::f16;
                                            return c;
                                          }(any),
                                          [](EightBitBackwardConfig c) {
                                            c.schedule.deterministic = true;
                                            return c;
                                          }(any),
                                          [](EightBitBackwardConfig c) {
                                            c.f32_dq = c.f32_dk_dv = true;
                                            return c;
                                          }(any)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
