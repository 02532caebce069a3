// Kernels whose gradients are f32, of every way in which warpgroups divide dK and dV.
#include "backward/families.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr Mask every{.causal = true, .local = true, .varlen = true};
constexpr BackwardConfig narrow{
    .tiling = {.head_dim_qk = 64, .head_dim_v = 64, .block_m = 128, .block_n = 128}, .mask = every};

constexpr BackwardConfig pingpong(BackwardConfig c) {
  c.q_stages = 3;
  c.schedule.pingpong = c.schedule.overlaps_tiles = true;
  return c;
}
constexpr auto capped_f16(auto c) {
  c.tiling.element = Element::f16;
  c.transform = ScoreTransform::softcap;
  return c;
}
constexpr BackwardConfig with_every_mask(BackwardConfig c) {
  c.mask = every;
  return c;
}
constexpr Sm80BackwardConfig of_sm80(int head_dim, int block_m, int block_n) {
  return {.tiling = {.head_dim_qk = head_dim, .head_dim_v = head_dim, .block_m = block_m, .block_n = block_n},
          .mask = every};
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
  constexpr Sm80BackwardConfig plain = of_sm80(64, 128, 128);
  constexpr Sm80BackwardConfig halved = of_sm80(256, 32, 64);
  static constexpr auto kernels =
      emulate<in_f32(plain, true, false), in_f32(plain, false, true), in_f32(plain, true, true),
              in_f32(capped_f16(plain), true, true), in_f32(halved, true, true)>();
  return kernels;
}

}  // namespace tandem::kernel_tests
