// Head dimensions up to 96.
#include "backward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedBackward> narrow_backwards() {
  constexpr BackwardConfig full{
      .head_dim_qk = 64, .head_dim_v = 64, .block_m = 128, .block_n = 128, .dout_stages = 1};
  static constexpr auto kernels = emulate<full,
                                          [](BackwardConfig c) {
                                            c.causal = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.element = Element::f16;
                                            c.causal = c.local = c.softcap = c.varlen = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.head_dim_qk = 32;
                                            c.causal = c.deterministic = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.dout_stages = 2;
                                            c.causal = c.local = c.pingpong = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.q_stages = 3;
                                            c.dout_stages = 2;
                                            c.pingpong = c.staggered = c.deterministic = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.q_stages = 3;
                                            c.dout_stages = 2;
                                            c.causal = c.pingpong = true;
                                            return c;
                                          }(full)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
