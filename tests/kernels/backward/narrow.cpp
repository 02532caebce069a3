// Head dimensions up to 96.
#include "backward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedBackward> narrow_backwards() {
  constexpr BackwardConfig full{
      .tiling = {.head_dim_qk = 64, .head_dim_v = 64, .block_m = 128, .block_n = 128}, .dout_stages = 1};
  static constexpr auto kernels = emulate<full,
                                          [](BackwardConfig c) {
                                            c.mask.causal = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.tiling.element = Element::f16;
                                            c.mask.causal = c.mask.local = c.mask.varlen = true;
                                            c.transform = ScoreTransform::softcap;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.tiling.head_dim_qk = 32;
                                            c.mask.causal = c.schedule.deterministic = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.dout_stages = 2;
                                            c.mask.causal = c.mask.local = c.schedule.pingpong = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.q_stages = 3;
                                            c.dout_stages = 2;
                                            c.schedule.pingpong = c.schedule.staggered =
                                                c.schedule.deterministic = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.q_stages = 3;
                                            c.dout_stages = 2;
                                            c.mask.causal = c.schedule.pingpong = true;
                                            return c;
                                          }(full)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
