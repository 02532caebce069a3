// Kernels that run any problem up to a head dimension: every mask and varlen lengths.
#include "forward/families.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr ForwardConfig general(Element element, int head_dim, ScoreTransform transform,
                                KeySource keys = rows) {
  return {.tiling = {.element = element,
                     .head_dim_qk = head_dim,
                     .head_dim_v = head_dim,
                     .block_n = head_dim == 256 ? 80 : 128},
          .mask = {.causal = true, .local = true, .varlen = true},
          .keys = keys,
          .transform = transform,
          .schedule = {.pingpong = head_dim != 256}};
}

/// The tile of a step of generation: 64 rows, whose key blocks thread blocks share.
constexpr ForwardConfig split(Element element, int head_dim, KeySource keys, ScoreTransform transform = raw) {
  ForwardConfig c = general(element, head_dim, transform, keys);
  c.tiling.block_m = 64;
  c.tiling.block_n = head_dim == 256 ? 32 : 64;
  c.schedule.pingpong = false;
  c.schedule.split = true;
  return c;
}

/// The same of calls with a split size: its splits shared by thread blocks, or computed one by one.
constexpr ForwardConfig invariant(ForwardConfig c) {
  c.tiling.block_n = c.tiling.head_dim_v == 256 ? 32 : 64;
  c.schedule.invariant = true;
  return c;
}

}  // namespace

std::span<const EmulatedForward> split_forwards() {
  static constexpr auto kernels =
      emulate<split(f16, 64, rows), split(bf16, 64, rows), split(bf16, 64, rows, softcap),
              split(bf16, 256, rows), split(f16, 64, pages), split(bf16, 64, pages), split(bf16, 256, pages),
              split(bf16, 64, entries), split(bf16, 64, padded_pages), invariant(split(f16, 64, rows)),
              invariant(split(bf16, 64, rows)), invariant(split(bf16, 64, rows, softcap)),
              invariant(split(bf16, 256, rows)), invariant(split(f16, 64, pages)),
              invariant(split(bf16, 64, pages)), invariant(split(bf16, 64, pages, softcap)),
              invariant(split(bf16, 256, pages)), invariant(split(bf16, 64, entries)),
              invariant(split(bf16, 64, padded_pages)), by_sequence(split(bf16, 64, rows)),
              by_sequence(split(bf16, 64, pages)), by_sequence(invariant(split(bf16, 64, pages))),
              f32_out(split(bf16, 64, rows)), f32_out(split(f16, 64, pages)),
              f32_out(invariant(split(bf16, 64, rows))), f32_out(by_sequence(split(bf16, 64, pages)))>();
  return kernels;
}

std::span<const EmulatedForward> general_forwards() {
  static constexpr auto kernels = emulate<
      general(f16, 64, raw), general(f16, 64, scaled), general(f16, 64, softcap), general(bf16, 64, raw),
      general(bf16, 64, scaled), general(bf16, 64, softcap), general(f16, 256, raw), general(bf16, 256, raw),
      general(f16, 64, raw, gathered_pages), general(bf16, 64, raw, gathered_pages),
      general(bf16, 256, raw, gathered_pages), general(f16, 64, raw, pages), general(bf16, 64, raw, pages),
      general(bf16, 256, raw, pages), general(bf16, 256, softcap, pages), general(f16, 64, raw, entries),
      general(bf16, 64, raw, entries), general(bf16, 64, raw, padded_pages),
      general(bf16, 256, raw, padded_pages), invariant(general(f16, 64, raw)),
      invariant(general(bf16, 64, raw)), invariant(general(bf16, 64, softcap)),
      invariant(general(bf16, 256, raw)), invariant(general(f16, 64, raw, pages)),
      invariant(general(bf16, 64, raw, pages)), invariant(general(bf16, 64, softcap, pages)),
      invariant(general(bf16, 256, raw, pages)), invariant(general(bf16, 64, raw, entries)),
      by_sequence(general(bf16, 64, raw)), by_sequence(general(f16, 64, raw, pages)),
      by_sequence(general(bf16, 64, raw, pages)), by_sequence(invariant(general(bf16, 64, raw, pages))),
      f32_out(general(bf16, 64, raw)), f32_out(general(f16, 64, raw, pages)),
      f32_out(invariant(general(bf16, 64, raw))), f32_out(by_sequence(general(bf16, 64, raw, pages)))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
