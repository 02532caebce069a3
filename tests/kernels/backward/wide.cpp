// Head dimensions up to 128.
#include "backward/families.hpp"

namespace tandem::kernel_tests {

namespace {

/// Tiles take each query block for all heads of the group.
constexpr BackwardConfig turned(auto with) {
  BackwardConfig c{.q_stages = 3,
                   .dout_stages = 3,
                   .mask = {.causal = true},
                   .schedule = {.pingpong = true, .turned = true}};
  with(c);
  return c;
}

}  // namespace

std::span<const EmulatedBackward> wide_backwards() {
  constexpr BackwardConfig full{};
  static constexpr auto kernels = emulate<full,
                                          [](BackwardConfig c) {
                                            c.tiling.element = Element::f16;
                                            c.mask.causal = c.mask.varlen = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.mask.local = c.schedule.deterministic = true;
                                            c.transform = ScoreTransform::softcap;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.tiling.head_dim_v = 96;
                                            c.mask.causal = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.q_stages = c.dout_stages = 3;
                                            c.mask.causal = c.mask.varlen = c.schedule.deterministic =
                                                c.schedule.pingpong = true;
                                            return c;
                                          }(full),
                                          [](BackwardConfig c) {
                                            c.q_stages = c.dout_stages = 3;
                                            c.schedule.pingpong = c.schedule.staggered = true;
                                            return c;
                                          }(full),
                                          turned([](BackwardConfig&) {}), turned([](BackwardConfig& c) {
                                            c.tiling.element = Element::f16;
                                            c.mask.varlen = true;
                                          }),
                                          [](BackwardConfig c) {
                                            c.tiling.element = Element::f16;
                                            c.mask.causal = c.schedule.pingpong = true;
                                            c.transform = ScoreTransform::softcap;
                                            return c;
                                          }(full)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
