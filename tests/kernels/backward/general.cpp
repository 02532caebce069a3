// Kernels for whatever a test brings.
#include "backward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedBackward> general_backwards() {
  constexpr BackwardConfig narrow{
      .tiling = {.head_dim_qk = 64, .head_dim_v = 64, .block_m = 128, .block_n = 128},
      .mask = {.causal = true, .local = true, .varlen = true}};
  static constexpr auto kernels = emulate<[](BackwardConfig c) {
    c.q_stages = 3;
    c.schedule.pingpong = c.schedule.overlaps_tiles = true;
    return c;
  }(narrow),
                                          [](BackwardConfig c) {
                                            c.tiling.element = Element::f16;
                                            c.transform = ScoreTransform::softcap;
                                            return c;
                                          }(narrow),
                                          [](BackwardConfig c) {
                                            c.tiling.element = Element::f16;
                                            c.tiling.head_dim_qk = c.tiling.head_dim_v = 128;
                                            c.tiling.block_m = 64;
                                            c.q_stages = c.dout_stages = 3;
                                            c.schedule.pingpong = true;
                                            return c;
                                          }(narrow),
                                          [](BackwardConfig c) {
                                            c.mask.causal = c.mask.local = c.mask.varlen = true;
                                            return c;
                                          }(cluster_of_two)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
