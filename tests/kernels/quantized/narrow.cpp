// Head dimensions up to 96.
#include "quantized/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedQuantized> narrow_quantized() {
  static constexpr auto kernels =
      emulate_quantized<QuantizedConfig{.head_dim_qk = 64, .head_dim_v = 64, .block_m = 192, .stages = 3},
                        QuantizedConfig{.element = Element::f16,
                                        .head_dim_qk = 64,
                                        .head_dim_v = 64,
                                        .q_stages = 2,
                                        .causal = true,
                                        .local = true,
                                        .ragged = true,
                                        .dynamic = true,
                                        .parts = 1},
                        QuantizedConfig{.element = Element::f16,
                                        .head_dim_qk = 64,
                                        .head_dim_v = 64,
                                        .block_m = 192,
                                        .stages = 3,
                                        .causal = true,
                                        .dynamic = true,
                                        .pingpong = false,
                                        .parts = 1,
                                        .promote_every = 2},
                        QuantizedConfig{.head_dim_qk = 96,
                                        .head_dim_v = 96,
                                        .block_m = 192,
                                        .overlap = false,
                                        .pingpong = false,
                                        .parts = 3},
                        QuantizedConfig{.qk = Codes::s8,
                                        .pv = Codes::s8,
                                        .head_dim_qk = 64,
                                        .head_dim_v = 64,
                                        .block_m = 192,
                                        .causal = true,
                                        .rotated_v = true,
                                        .pingpong = false},
                        QuantizedConfig{.qk = Codes::s8,
                                        .pv = Codes::s8,
                                        .head_dim_qk = 64,
                                        .head_dim_v = 64,
                                        .block_m = 192,
                                        .rotated_v = true,
                                        .overlap = false,
                                        .parts = 1}>();
  return kernels;
}

}  // namespace tandem::kernel_tests
