// Head dimension 128.
#include "eight_bit/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedEightBit> wide_eight_bit() {
  constexpr EightBitConfig int8{
      .qk = OperandType::s8, .pv = OperandType::s8, .rotated_v = true, .schedule = {.pingpong = false}};
  static constexpr auto kernels = emulate_eight_bit<
      EightBitConfig{.slices = 1},
      EightBitConfig{.mask = {.causal = true}, .linear_exp2 = true, .schedule = {.dynamic = true}},
      EightBitConfig{.tiling = {.block_m = 192},
                     .mask = {.varlen = true},
                     .slices = 1,
                     .schedule = {.dynamic = true, .overlap = false}},
      EightBitConfig{.tiling = {.element = Element::f16, .block_m = 192},
                     .mask = {.causal = true},
                     .linear_exp2 = true,
                     .schedule = {.dynamic = true, .overlap = false, .pingpong = false}},
      EightBitConfig{.mask = {.causal = true}, .row_scales = true, .v_row_scales = true}, int8,
      [](EightBitConfig c) {
        c.mask.causal = c.schedule.dynamic = true;
        c.tiling.element = Element::f16;
        return c;
      }(int8),
      [](EightBitConfig c) {
        c.mask.causal = c.mask.varlen = c.schedule.dynamic = c.row_scales = c.v_row_scales = true;
        c.tiling.element = Element::f16;
        return c;
      }(int8),
      with_maxima(int8),
      [](EightBitConfig c) {
        c.mask.causal = c.schedule.dynamic = true;
        c.tiling.element = Element::f16;
        return with_maxima(c);
      }(int8),
      [](EightBitConfig c) {
        c.mask.causal = c.mask.varlen = c.schedule.dynamic = c.row_scales = c.v_row_scales = true;
        c.tiling.element = Element::f16;
        return with_maxima(c);
      }(int8)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
