// Head dimensions 192 and 256.
#include "forward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedForward> widest_forwards() {
  static constexpr auto kernels =
      emulate<ForwardConfig{.tiling = {.head_dim_qk = 192, .head_dim_v = 128},
                            .mask = {.causal = true},
                            .schedule = {.pingpong = false, .output_late = true}},
              ForwardConfig{
                  .tiling = {.element = Element::f16, .head_dim_qk = 192, .head_dim_v = 192, .block_n = 112},
                  .schedule = {.pingpong = false}},
              ForwardConfig{.tiling = {.head_dim_qk = 256, .head_dim_v = 256, .block_n = 80},
                            .schedule = {.pingpong = false}},
              ForwardConfig{.tiling = {.head_dim_qk = 256, .head_dim_v = 256, .block_n = 64}},
              ForwardConfig{
                  .tiling = {.element = Element::f16, .head_dim_qk = 256, .head_dim_v = 256, .block_n = 80},
                  .mask = {.causal = true, .local = true, .varlen = true},
                  .transform = ScoreTransform::softcap,
                  .schedule = {.pingpong = false}}>();
  return kernels;
}

}  // namespace tandem::kernel_tests
