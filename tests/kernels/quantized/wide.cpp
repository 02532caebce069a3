// Head dimension 128.
#include "quantized/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedQuantized> wide_quantized() {
  constexpr QuantizedConfig int8{.qk = Codes::s8, .pv = Codes::s8, .rotated_v = true, .pingpong = false};
  static constexpr auto kernels = emulate_quantized<
      QuantizedConfig{.parts = 1}, QuantizedConfig{.causal = true, .dynamic = true, .linear_exp2 = true},
      QuantizedConfig{.block_m = 192, .ragged = true, .dynamic = true, .overlap = false, .parts = 1},
      QuantizedConfig{.element = Element::f16,
                      .block_m = 192,
                      .causal = true,
                      .dynamic = true,
                      .overlap = false,
                      .pingpong = false,
                      .linear_exp2 = true},
      QuantizedConfig{.causal = true, .row_scales = true, .v_row_scales = true}, int8,
      [](QuantizedConfig c) {
        c.causal = c.dynamic = true;
        c.element = Element::f16;
        return c;
      }(int8),
      [](QuantizedConfig c) {
        c.causal = c.ragged = c.dynamic = c.row_scales = c.v_row_scales = true;
        c.element = Element::f16;
        return c;
      }(int8),
      QuantizedConfig{.element = Element::f16,
                      .qk = Codes::s8,
                      .pv = Codes::input,
                      .causal = true,
                      .ragged = true,
                      .row_scales = true,
                      .dynamic = true,
                      .parts = 1}>();
  return kernels;
}

}  // namespace tandem::kernel_tests
