// Head dimensions up to 128.
#include "backward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedBackward> wide_backwards() {
  constexpr BackwardConfig full{};
  static constexpr auto kernels = emulate<full,
                                          [](BackwardConfig c) {
                                            c.element = Element::f16;
                                            c.causal = c.ragged = true;
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
                                            c.dout_stages = 1;
                                            c.causal = c.ragged = c.deterministic = c.scores_ahead = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.k_stages = 2;
                                            c.scores_ahead = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.k_stages = 2;
                                            c.dq_behind = c.rotated = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.causal = c.ragged = c.deterministic = c.dq_behind = true;
                                            return c;
                                          }(full)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
