// Head dimension 128.
#include "eight_bit/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedEightBit> wide_eight_bit() {
  constexpr EightBitConfig int8{.qk = Codes::s8, .pv = Codes::s8, .rotated_v = true, .pingpong = false};
  static constexpr auto kernels = emulate_eight_bit<
      EightBitConfig{.parts = 1}, EightBitConfig{.causal = true, .dynamic = true, .linear_exp2 = true},
      EightBitConfig{.block_m = 192, .varlen = true, .dynamic = true, .overlap = false, .parts = 1},
      EightBitConfig{.element = Element::f16,
                     .block_m = 192,
                     .causal = true,
                     .dynamic = true,
                     .overlap = false,
                     .pingpong = false,
                     .linear_exp2 = true},
      EightBitConfig{.causal = true, .row_scales = true, .v_row_scales = true}, int8,
      [](EightBitConfig c) {
        c.causal = c.dynamic = true;
        c.element = Element::f16;
        return c;
      }(int8),
      [](EightBitConfig c) {
        c.causal = c.varlen = c.dynamic = c.row_scales = c.v_row_scales = true;
        c.element = Element::f16;
        return c;
      }(int8),
      EightBitConfig{.element = Element::f16,
                     .qk = Codes::s8,
                     .pv = Codes::input,
                     .causal = true,
                     .varlen = true,
                     .row_scales = true,
                     .dynamic = true,
                     .parts = 1}>();
  return kernels;
}

}  // namespace tandem::kernel_tests
