// Kernels that run any problem up to a head dimension: every mask and varlen lengths.
#include "forward/families.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr ForwardConfig general(Element element, int head_dim, ScoreTransform transform,
                                KeySource keys = KeySource::rows) {
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
constexpr ForwardConfig split(Element element, int head_dim, KeySource keys,
                              ScoreTransform transform = ScoreTransform::raw) {
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
      emulate<split(Element::f16, 64, KeySource::rows), split(Element::bf16, 64, KeySource::rows),
              split(Element::bf16, 64, KeySource::rows, ScoreTransform::softcap),
              split(Element::bf16, 256, KeySource::rows), split(Element::f16, 64, KeySource::pages),
              split(Element::bf16, 64, KeySource::pages), split(Element::bf16, 256, KeySource::pages),
              split(Element::bf16, 64, KeySource::entries), split(Element::bf16, 64, KeySource::padded_pages),
              invariant(split(Element::f16, 64, KeySource::rows)),
              invariant(split(Element::bf16, 64, KeySource::rows)),
              invariant(split(Element::bf16, 64, KeySource::rows, ScoreTransform::softcap)),
              invariant(split(Element::bf16, 256, KeySource::rows)),
              invariant(split(Element::f16, 64, KeySource::pages)),
              invariant(split(Element::bf16, 64, KeySource::pages)),
              invariant(split(Element::bf16, 64, KeySource::pages, ScoreTransform::softcap)),
              invariant(split(Element::bf16, 256, KeySource::pages)),
              invariant(split(Element::bf16, 64, KeySource::entries)),
              invariant(split(Element::bf16, 64, KeySource::padded_pages)),
              by_sequence(split(Element::bf16, 64, KeySource::rows)),
              by_sequence(split(Element::bf16, 64, KeySource::pages)),
              by_sequence(invariant(split(Element::bf16, 64, KeySource::pages))),
              f32_out(split(Element::bf16, 64, KeySource::rows)),
              f32_out(split(Element::f16, 64, KeySource::pages)),
              f32_out(invariant(split(Element::bf16, 64, KeySource::rows))),
              f32_out(by_sequence(split(Element::bf16, 64, KeySource::pages)))>();
  return kernels;
}

std::span<const EmulatedForward> general_forwards() {
  static constexpr auto kernels = emulate<
      general(Element::f16, 64, ScoreTransform::raw), general(Element::f16, 64, ScoreTransform::scaled),
      general(Element::f16, 64, ScoreTransform::softcap), general(Element::bf16, 64, ScoreTransform::raw),
      general(Element::bf16, 64, ScoreTransform::scaled), general(Element::bf16, 64, ScoreTransform::softcap),
      general(Element::f16, 256, ScoreTransform::raw), general(Element::bf16, 256, ScoreTransform::raw),
      general(Element::f16, 64, ScoreTransform::raw, KeySource::pages),
      general(Element::bf16, 64, ScoreTransform::raw, KeySource::pages),
      general(Element::bf16, 256, ScoreTransform::raw, KeySource::pages),
      general(Element::bf16, 256, ScoreTransform::softcap, KeySource::pages),
      general(Element::f16, 64, ScoreTransform::raw, KeySource::entries),
      general(Element::bf16, 64, ScoreTransform::raw, KeySource::entries),
      general(Element::bf16, 64, ScoreTransform::raw, KeySource::padded_pages),
      general(Element::bf16, 256, ScoreTransform::raw, KeySource::padded_pages),
      invariant(general(Element::f16, 64, ScoreTransform::raw)),
      invariant(general(Element::bf16, 64, ScoreTransform::raw)),
      invariant(general(Element::bf16, 64, ScoreTransform::softcap)),
      invariant(general(Element::bf16, 256, ScoreTransform::raw)),
      invariant(general(Element::f16, 64, ScoreTransform::raw, KeySource::pages)),
      invariant(general(Element::bf16, 64, ScoreTransform::raw, KeySource::pages)),
      invariant(general(Element::bf16, 64, ScoreTransform::softcap, KeySource::pages)),
      invariant(general(Element::bf16, 256, ScoreTransform::raw, KeySource::pages)),
      invariant(general(Element::bf16, 64, ScoreTransform::raw, KeySource::entries)),
      by_sequence(general(Element::bf16, 64, ScoreTransform::raw)),
      by_sequence(general(Element::f16, 64, ScoreTransform::raw, KeySource::pages)),
      by_sequence(general(Element::bf16, 64, ScoreTransform::raw, KeySource::pages)),
      by_sequence(invariant(general(Element::bf16, 64, ScoreTransform::raw, KeySource::pages))),
      f32_out(general(Element::bf16, 64, ScoreTransform::raw)),
      f32_out(general(Element::f16, 64, ScoreTransform::raw, KeySource::pages)),
      f32_out(invariant(general(Element::bf16, 64, ScoreTransform::raw))),
      f32_out(by_sequence(general(Element::bf16, 64, ScoreTransform::raw, KeySource::pages)))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
