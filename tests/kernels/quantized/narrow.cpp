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
                                        .parts = 1,
                                        .polynomials = 2},
                        QuantizedConfig{.head_dim_qk = 96,
                                        .head_dim_v = 96,
                                        .block_m = 192,
                                        .overlap = false,
                                        .pingpong = false,
                                        .parts = 3}>();
  return kernels;
}

}  // namespace tandem::kernel_tests
