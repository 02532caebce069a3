// Head dimensions 192 and 256.
#include "forward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedForward> widest_forwards() {
  static constexpr auto kernels = emulate<
      ForwardConfig{
          .head_dim_qk = 192, .head_dim_v = 128, .causal = true, .output_late = true, .pingpong = false},
      ForwardConfig{
          .element = Element::f16, .head_dim_qk = 192, .head_dim_v = 192, .block_n = 112, .pingpong = false},
      ForwardConfig{.head_dim_qk = 256, .head_dim_v = 256, .block_n = 80, .pingpong = false},
      ForwardConfig{.head_dim_qk = 256, .head_dim_v = 256, .block_n = 64},
      ForwardConfig{.element = Element::f16,
                    .head_dim_qk = 256,
                    .head_dim_v = 256,
                    .block_n = 80,
                    .causal = true,
                    .local = true,
                    .transform = ScoreTransform::softcap,
                    .varlen = true,
                    .pingpong = false}>();
  return kernels;
}

}  // namespace tandem::kernel_tests
