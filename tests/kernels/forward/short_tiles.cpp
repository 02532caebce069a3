// Configs whose warpgroups are not in step: they walk their own blocks, or are teams with tiles of their own.
#include "forward/families.hpp"

namespace tandem::kernel_tests {

std::span<const EmulatedForward> short_tile_forwards() {
  constexpr ForwardConfig teams{
      .tiling = {.head_dim_qk = 64, .head_dim_v = 64, .block_m = 128, .block_n = 64},
      .stages = 4,
      .q_stages = 2,
      .teams = 2,
      .mask = {.causal = true},
      .schedule = {.dynamic = true, .pingpong = false, .own_blocks = true}};
  constexpr ForwardConfig three{
      .tiling = {.block_m = 192, .block_n = 64},
      .stages = 4,
      .q_stages = 2,
      .mask = {.causal = true},
      .schedule = {.dynamic = true, .pingpong = false, .output_late = true, .own_blocks = true}};
  constexpr auto in_step = [](ForwardConfig c) {
    c.schedule.own_blocks = false;
    return c;
  };
  static constexpr auto kernels =
      emulate<teams, three,
              [](ForwardConfig c) {
                c.mask.local = true;
                return c;
              }(three),
              [](ForwardConfig c) {
                c.mask.local = true;
                c.stages = 2;
                c.q_stages = 1;
                c.transform = ScoreTransform::softcap;
                return f32_out(c);
              }(teams),
              [](ForwardConfig c) {
                c.mask.causal = false;
                c.mask.local = true;
                c.tiling.element = Element::f16;
                c.schedule.dynamic = false;
                return c;
              }(three),
              [](ForwardConfig c) {
                c.mask.causal = false;
                return c;
              }(in_step(teams)),
              [](ForwardConfig c) {
                c.mask.local = c.mask.varlen = true;
                return by_sequence(c);
              }(in_step(teams)),
              [](ForwardConfig c) {
                c.mask.varlen = true;
                c.keys = pages;
                return c;
              }(in_step(teams)),
              by_sequence(teams),
              [](ForwardConfig c) {
                c.mask.causal = false;
                return c;
              }(in_step(three)),
              [](ForwardConfig c) {
                c.tiling.head_dim_qk = c.tiling.head_dim_v = c.tiling.block_n = 96;
                c.stages = 3;
                c.schedule.output_late = false;
                return c;
              }(three),
              ForwardConfig{
                  .tiling = {.head_dim_qk = 160, .head_dim_v = 160},
                  .mask = {.causal = true, .local = true},
                  .schedule = {.dynamic = true, .pingpong = false, .output_late = true, .own_blocks = true}},
              ForwardConfig{.tiling = {.head_dim_qk = 192, .head_dim_v = 192, .block_n = 112},
                            .mask = {.causal = true},
                            .schedule = {.dynamic = true, .pingpong = false, .own_blocks = true}},
              ForwardConfig{.tiling = {.head_dim_qk = 256, .head_dim_v = 256, .block_n = 64},
                            .mask = {.causal = true, .local = true},
                            .schedule = {.dynamic = true, .pingpong = false, .own_blocks = true}}>();
  return kernels;
}

}  // namespace tandem::kernel_tests
