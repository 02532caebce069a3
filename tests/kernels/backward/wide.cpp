// Head dimensions up to 128.
#include "backward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedBackward> wide_backwards() {
  constexpr BackwardConfig full{};
  static constexpr auto kernels = emulate<full,
                                          [](BackwardConfig c) {
                                            c.element = Element::f16;
                                            c.causal = c.varlen = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.local = c.softcap = c.deterministic = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.head_dim_v = 96;
                                            c.causal = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.q_stages = c.dout_stages = 3;
                                            c.causal = c.varlen = c.deterministic = c.pingpong = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.q_stages = c.dout_stages = 3;
                                            c.pingpong = c.staggered = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.element = Element::f16;
                                            c.causal = c.softcap = c.pingpong = true;
                                            return c;
                                          }(full)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
