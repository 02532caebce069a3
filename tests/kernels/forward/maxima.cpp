// Kernels that write the largest logit of each row: of every mask and any lengths, with shared keys and a
// split size, and in tiles whose unmasked blocks otherwise keep their maxima.
#include "forward/families.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr ForwardConfig any(Element element, ScoreTransform transform, KeySource keys = rows) {
  return with_maxima(ForwardConfig{.tiling = {.element = element, .head_dim_qk = 64, .head_dim_v = 64},
                                   .mask = {.causal = true, .local = true, .varlen = true},
                                   .keys = keys,
                                   .transform = transform});
}
constexpr ForwardConfig of_few(ForwardConfig c) {
  c.tiling.block_m = c.tiling.block_n = 64;
  c.schedule = {.pingpong = false, .split = true};
  return c;
}

}  // namespace

std::span<const EmulatedForward> maxima_forwards() {
  static constexpr auto kernels = emulate<
      of_few(any(f16, raw)), of_few(any(bf16, raw)), of_few(any(bf16, raw, pages)),
      with_split_size(of_few(any(bf16, raw))),
      [](ForwardConfig c) {
        c.tiling.heads_as_rows = true;
        return c;
      }(of_few(any(bf16, scaled))),
      any(f16, raw), any(bf16, raw), any(bf16, scaled), any(bf16, softcap), any(bf16, raw, gathered_pages),
      by_sequence(any(bf16, raw)), with_split_size(any(f16, raw)), with_split_size(any(bf16, raw)),
      with_maxima(ForwardConfig{.tiling = {.block_n = 128}, .stages = 3, .schedule = {.output_late = true}}),
      with_maxima(ForwardConfig{
          .tiling = {.block_m = 192, .block_n = 64},
          .stages = 4,
          .q_stages = 2,
          .mask = {.causal = true},
          .schedule = {.dynamic = true, .pingpong = false, .output_late = true, .own_blocks = true}}),
      with_maxima(
          ForwardConfig{.tiling = {.head_dim_qk = 64, .head_dim_v = 64, .block_n = 64, .f32_out = true},
                        .stages = 4,
                        .q_stages = 2,
                        .teams = 2,
                        .schedule = {.dynamic = true, .pingpong = false}}),
      with_maxima(ForwardConfig{.tiling = {.head_dim_qk = 64, .head_dim_v = 64},
                                .mask = {.causal = true, .varlen = true},
                                .transform = scaled,
                                .schedule = {.pingpong = false},
                                .key_type = OperandType::e4m3})>();
  return kernels;
}

}  // namespace tandem::kernel_tests
