// Head dimensions up to 96.
#include "backward/families.hpp"

namespace tandem::kernel_tests {

namespace {

/// Ping-pong goes on from tile to tile.
constexpr BackwardConfig overlapping(auto with) {
  BackwardConfig c{.tiling = {.head_dim_qk = 64, .head_dim_v = 64, .block_m = 128, .block_n = 128},
                   .q_stages = 3,
                   .schedule = {.pingpong = true, .overlaps_tiles = true}};
  with(c);
  return c;
}

}  // namespace

std::span<const EmulatedBackward> narrow_backwards() {
  constexpr BackwardConfig full{
      .tiling = {.head_dim_qk = 64, .head_dim_v = 64, .block_m = 128, .block_n = 128}, .dout_stages = 1};
  static constexpr auto kernels =
      emulate<full,
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
                c.schedule.pingpong = c.schedule.staggered = c.schedule.deterministic = true;
                return c;
              }(full),
              [](BackwardConfig c) {
                c.q_stages = 3;
                c.dout_stages = 2;
                c.mask.causal = c.schedule.pingpong = true;
                return c;
              }(full),
              overlapping([](BackwardConfig& c) { c.mask.causal = true; }),
              overlapping([](BackwardConfig& c) { c.schedule.staggered = c.schedule.deterministic = true; }),
              overlapping([](BackwardConfig& c) {
                c.tiling.element = Element::f16;
                c.mask.causal = c.mask.local = c.mask.varlen = true;
              }),
              overlapping([](BackwardConfig& c) {
                c.tiling.head_dim_v = 32;
                c.mask.causal = c.mask.varlen = true;
                c.schedule.deterministic = true;
              })>();
  return kernels;
}

}  // namespace tandem::kernel_tests
