// The family sm80: each line of its table, with every mask, in any order and a fixed one.
#include "backward/families.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr Sm80BackwardConfig narrow{
    .tiling = {.head_dim_qk = 64, .head_dim_v = 64, .block_m = 128, .block_n = 128}};
constexpr Sm80BackwardConfig wide{
    .tiling = {.head_dim_qk = 128, .head_dim_v = 128, .block_m = 64, .block_n = 128}};
/// Whose queries two warpgroups halve.
constexpr Sm80BackwardConfig wider{
    .tiling = {.head_dim_qk = 192, .head_dim_v = 192, .block_m = 64, .block_n = 64}};

constexpr Sm80BackwardConfig with_mask(Sm80BackwardConfig c, Mask mask) {
  c.mask = mask;
  return c;
}
constexpr Sm80BackwardConfig in_order(Sm80BackwardConfig c) {
  c.schedule.deterministic = true;
  return c;
}
constexpr Sm80BackwardConfig capped_f16(Sm80BackwardConfig c) {
  c.tiling.element = Element::f16;
  c.transform = ScoreTransform::softcap;
  return c;
}
/// As on GPUs with 100 KB of shared memory an SM.
constexpr Sm80BackwardConfig in_little_memory(Sm80BackwardConfig c) {
  c.q_stages = c.dout_stages = 1;
  c.ds_in_dout = c.tiling.block_m == 64;
  return c;
}
constexpr Sm80BackwardConfig in_one_stage(Sm80BackwardConfig c) {
  c.q_stages = c.dout_stages = 1;
  return c;
}
constexpr Sm80BackwardConfig of_32_queries(Sm80BackwardConfig c) {
  c.tiling.block_m = 32;
  c.q_stages = 2;
  c.dout_stages = 1;
  return c;
}
constexpr Sm80BackwardConfig of_32_in_little_memory(Sm80BackwardConfig c) {
  c.tiling.block_m = 32;
  c.q_stages = c.dout_stages = 1;
  c.ds_in_dout = true;
  return c;
}
constexpr Sm80BackwardConfig with_two_q_stages(Sm80BackwardConfig c) {
  c.q_stages = 2;
  return c;
}
constexpr Sm80BackwardConfig of_heads(Sm80BackwardConfig c, int head_dim_qk, int head_dim_v) {
  c.tiling.head_dim_qk = head_dim_qk;
  c.tiling.head_dim_v = head_dim_v;
  return c;
}
/// Two units of 64 keys, whose work warpgroups divide.
constexpr Sm80BackwardConfig halved(Sm80BackwardConfig c) {
  c.halved = true;
  return c;
}
constexpr Mask causal{.causal = true};
constexpr Mask every{.causal = true, .local = true, .varlen = true};

}  // namespace

std::span<const EmulatedBackward> sm80_backwards() {
  static constexpr auto kernels =
      emulate<narrow, with_mask(narrow, causal), capped_f16(with_mask(narrow, every)),
              in_order(with_mask(of_heads(narrow, 32, 64), causal)), in_order(in_little_memory(narrow)),
              in_little_memory(with_mask(of_heads(narrow, 64, 32), every)), wide,
              in_order(with_mask(wide, every)), in_little_memory(with_mask(wide, causal)),
              with_two_q_stages(in_little_memory(with_mask(wide, causal))),
              capped_f16(in_little_memory(with_mask(of_heads(wide, 128, 96), every))), wider,
              in_order(with_mask(of_heads(wider, 192, 128), every)), with_mask(of_32_queries(wider), causal),
              in_order(with_mask(of_32_queries(wider), every)), with_mask(of_heads(wider, 256, 256), causal),
              capped_f16(in_one_stage(with_mask(of_heads(wider, 256, 256), every))),
              of_32_in_little_memory(of_heads(wider, 64, 256)), halved(narrow),
              in_order(halved(with_mask(narrow, causal))), halved(with_mask(wide, causal)),
              capped_f16(in_one_stage(halved(with_mask(of_heads(wide, 128, 64), every)))),
              in_order(capped_f16(of_32_in_little_memory(with_mask(of_heads(wider, 256, 256), every))))>();
  return kernels;
}

std::span<const EmulatedBackward> general_sm80_backwards() {
  static constexpr auto kernels =
      emulate<with_mask(narrow, every), capped_f16(with_mask(narrow, every)),
              in_little_memory(with_mask(wide, every)), capped_f16(with_mask(wide, every)),
              halved(with_mask(narrow, every)), halved(with_mask(wide, every)),
              of_32_queries(with_mask(wider, every)),
              of_32_in_little_memory(with_mask(of_heads(wider, 256, 256), every)),
              capped_f16(in_one_stage(with_mask(of_heads(wider, 256, 256), every)))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
