// Head dimensions 192 and 256.
#include "backward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedBackward> widest_backwards() {
  static constexpr auto kernels =
      emulate<BackwardConfig{.tiling = {.head_dim_qk = 192, .head_dim_v = 128, .block_n = 64},
                             .mask = {.causal = true}},
              BackwardConfig{
                  .tiling = {.element = Element::f16, .head_dim_qk = 192, .head_dim_v = 192, .block_n = 64},
                  .mask = {.varlen = true}},
              [](BackwardConfig c) {
                c.schedule.staggered = true;
                return c;
              }(cluster_of_two),
              [](BackwardConfig c) {
                c.mask.causal = c.schedule.deterministic = true;
                return c;
              }(cluster_of_two),
              BackwardConfig{.tiling = {.head_dim_qk = 192, .head_dim_v = 128, .block_n = 64},
                             .mask = {.causal = true, .varlen = true}},
              [](BackwardConfig c) {
                c.tiling.element = Element::f16;
                c.mask.causal = c.mask.local = c.mask.varlen = c.schedule.deterministic = true;
                c.transform = ScoreTransform::softcap;
                return c;
              }(cluster_of_two)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
