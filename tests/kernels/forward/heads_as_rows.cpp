// Kernels whose tiles have several query heads of a KV head as rows: of whole tiles, of shared keys, and of
// calls with a split size.
#include "forward/families.hpp"

namespace tandem::kernel_tests {
namespace {

/// A tile of few queries. `split`: thread blocks share keys.
constexpr ForwardConfig grouped(Element element, int head_dim, KeySource keys, bool split,
                                ScoreTransform transform = raw) {
  return {.tiling = {.element = element,
                     .head_dim_qk = head_dim,
                     .head_dim_v = head_dim,
                     .block_m = 64,
                     .block_n = head_dim == 256 ? 32 : 64,
                     .heads_as_rows = true},
          .mask = {.causal = true, .local = true, .varlen = true},
          .keys = keys,
          .transform = transform,
          .schedule = {.pingpong = false, .split = split}};
}

/// Two warpgroups, and the scheduler of sequences of one length.
constexpr ForwardConfig dense(bool dynamic) {
  return {
      .tiling = {.head_dim_qk = 64, .head_dim_v = 64, .block_m = 128, .block_n = 64, .heads_as_rows = true},
      .q_stages = 2,
      .mask = {.causal = true, .local = true},
      .schedule = {.dynamic = dynamic}};
}

/// The same without a producer warp.
constexpr ForwardConfig unspecialised() {
  ForwardConfig c = dense(false);
  c.q_stages = 1;
  c.mask.local = false;
  c.schedule.specialised = false;
  return c;
}

}  // namespace

std::span<const EmulatedForward> heads_as_rows_forwards() {
  static constexpr auto kernels =
      emulate<grouped(bf16, 64, rows, true), grouped(f16, 64, rows, true), grouped(bf16, 64, pages, true),
              grouped(f16, 64, pages, true), grouped(bf16, 64, entries, true),
              grouped(bf16, 64, rows, true, softcap), grouped(bf16, 256, rows, true),
              grouped(bf16, 64, rows, false), grouped(bf16, 64, pages, false),
              grouped(bf16, 64, padded_pages, true), with_split_size(grouped(bf16, 64, rows, true)),
              with_split_size(grouped(f16, 64, pages, true)), with_split_size(grouped(bf16, 64, pages, true)),
              with_split_size(grouped(bf16, 64, padded_pages, true)),
              with_split_size(grouped(bf16, 64, rows, false)), dense(false), dense(true), unspecialised(),
              by_sequence(grouped(bf16, 64, pages, true)), by_sequence(dense(true)),
              f32_out(grouped(bf16, 64, rows, true)), f32_out(by_sequence(grouped(f16, 64, pages, false))),
              f32_out(with_split_size(grouped(bf16, 64, pages, true)))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
