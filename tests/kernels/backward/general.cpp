// Kernels for whatever a test brings.
#include "backward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedBackward> general_backwards() {
  constexpr BackwardConfig narrow{.head_dim_qk = 64,
                                  .head_dim_v = 64,
                                  .block_m = 128,
                                  .block_n = 128,
                                  .causal = true,
                                  .local = true,
                                  .varlen = true};
  static constexpr auto kernels = emulate<[](BackwardConfig c) {
    c.q_stages = 3;
    c.pingpong = true;
    return c;
  }(narrow),
                                          [](BackwardConfig c) {
                                            c.element = Element::f16;
                                            c.softcap = true;
                                            return c;
                                          }(narrow),
                                          [](BackwardConfig c) {
                                            c.element = Element::f16;
                                            c.head_dim_qk = c.head_dim_v = 128;
                                            c.block_m = 64;
                                            c.q_stages = c.dout_stages = 3;
                                            c.pingpong = true;
                                            return c;
                                          }(narrow),
                                          [](BackwardConfig c) {
                                            c.causal = c.local = c.varlen = true;
                                            return c;
                                          }(cluster_of_two)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
