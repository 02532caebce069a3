// Kernels whose gradients are f32, of every way in which warpgroups divide dK and dV.
#include "backward/families.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr Mask every{.causal = true, .local = true, .varlen = true};
constexpr BackwardConfig narrow{
    .tiling = {.head_dim_qk = 64, .head_dim_v = 64, .block_m = 128, .block_n = 128}, .mask = every};

constexpr BackwardConfig pingpong(BackwardConfig c) {
  c.q_stages = 3;
  c.schedule.pingpong = true;
  return c;
}
constexpr BackwardConfig capped_f16(BackwardConfig c) {
  c.tiling.element = Element::f16;
  c.softcap = true;
  return c;
}
constexpr BackwardConfig with_every_mask(BackwardConfig c) {
  c.mask = every;
  return c;
}
constexpr BackwardConfig of_sm80(BackwardConfig c, int head_dim, int block_m, int block_n) {
  c.family = Family::sm80;
  c.tiling.head_dim_qk = c.tiling.head_dim_v = head_dim;
  c.tiling.block_m = block_m;
  c.tiling.block_n = block_n;
  return c;
}

}  // namespace

std::span<const EmulatedBackward> f32_backwards() {
  static constexpr auto kernels =
      emulate<in_f32(pingpong(narrow), true, false), in_f32(pingpong(narrow), false, true),
              in_f32(pingpong(narrow), true, true), in_f32(capped_f16(narrow), true, false),
              in_f32(capped_f16(narrow), false, true), in_f32(capped_f16(narrow), true, true),
              in_f32(with_every_mask(cluster_of_two), true, true)>();
  return kernels;
}

std::span<const EmulatedBackward> f32_sm80_backwards() {
  constexpr BackwardConfig plain = of_sm80(narrow, 64, 128, 128);
  constexpr BackwardConfig halved = of_sm80(narrow, 256, 32, 64);
  static constexpr auto kernels =
      emulate<in_f32(plain, true, false), in_f32(plain, false, true), in_f32(plain, true, true),
              in_f32(capped_f16(plain), true, true), in_f32(halved, true, true)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
