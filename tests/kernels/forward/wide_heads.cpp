// The kernel `forward_wide`: V beside K and in it, of rows, entries and pages, of whole tiles and of shared
// keys. Narrow heads run the same code in less time; two Configs have the widths that models have.
#include "forward/families.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr LatentConfig halves(Element element, int head_dim_qk, int head_dim_v, KeySource keys, bool split,
                              ScoreTransform transform = ScoreTransform::raw) {
  return {.tiling = {.element = element,
                     .head_dim_qk = head_dim_qk,
                     .head_dim_v = head_dim_v,
                     .block_m = 64,
                     .block_n = 64,
                     .heads_as_rows = split},
          .stages = 1,
          .mask = {.causal = true, .local = true, .varlen = true},
          .keys = keys,
          .transform = transform,
          .schedule = {.split = split}};
}

constexpr LatentConfig in_k(LatentConfig c, int stages = 2) {
  c.stages = stages;
  c.v_in_k = true;
  return c;
}

/// Of two tiles a cluster.
constexpr LatentConfig in_pairs(LatentConfig c) {
  c.pairs = true;
  return c;
}

/// Of calls without lengths, whose tiles come from a counter.
constexpr LatentConfig dense(LatentConfig c, bool causal) {
  c.mask = {.causal = causal};
  c.schedule.dynamic = causal;
  return c;
}

}  // namespace

std::span<const EmulatedForward> wide_heads_forwards() {
  static constexpr auto kernels =
      emulate<halves(Element::bf16, 128, 128, KeySource::rows, false),
              halves(Element::f16, 64, 256, KeySource::rows, true),
              halves(Element::bf16, 192, 128, KeySource::pages, true),
              halves(Element::bf16, 128, 128, KeySource::entries, false, ScoreTransform::softcap),
              dense(halves(Element::f16, 128, 128, KeySource::rows, false), true),
              dense(halves(Element::bf16, 128, 128, KeySource::rows, false), false),
              in_k(halves(Element::bf16, 192, 128, KeySource::rows, true)),
              in_k(halves(Element::bf16, 192, 128, KeySource::pages, true)),
              in_k(halves(Element::f16, 192, 128, KeySource::pages, true), 3),
              in_k(halves(Element::f16, 192, 128, KeySource::padded_pages, true, ScoreTransform::scaled)),
              in_k(halves(Element::bf16, 128, 128, KeySource::entries, false)),
              dense(in_k(halves(Element::bf16, 192, 128, KeySource::rows, false)), true),
              [](LatentConfig c) {
                c.stages = 2;
                return c;
              }(halves(Element::bf16, 64, 128, KeySource::rows, false)),
              halves(Element::bf16, 512, 512, KeySource::rows, false),
              in_k(halves(Element::bf16, 576, 512, KeySource::pages, true)),
              with_split_size(halves(Element::bf16, 128, 128, KeySource::rows, false)),
              with_split_size(halves(Element::f16, 192, 256, KeySource::pages, true)),
              with_split_size(in_k(halves(Element::bf16, 192, 128, KeySource::pages, true))),
              with_split_size(in_k(halves(Element::bf16, 192, 128, KeySource::rows, false))),
              with_split_size(dense(halves(Element::bf16, 128, 128, KeySource::rows, false), true)),
              by_sequence(in_k(halves(Element::bf16, 192, 128, KeySource::pages, true))),
              f32_out(in_k(halves(Element::bf16, 192, 128, KeySource::pages, true))),
              f32_out(with_split_size(halves(Element::f16, 128, 256, KeySource::rows, false))),
              f32_out(by_sequence(halves(Element::bf16, 128, 128, KeySource::rows, false)))>();
  return kernels;
}

/// Groups of one strip of K and of two, two stages and three.
std::span<const EmulatedForward> pair_forwards() {
  static constexpr auto kernels =
      emulate<in_pairs(in_k(halves(Element::bf16, 192, 128, KeySource::rows, true))),
              in_pairs(in_k(halves(Element::f16, 192, 128, KeySource::pages, true), 3)),
              in_pairs(in_k(halves(Element::bf16, 320, 256, KeySource::rows, true))),
              in_pairs(in_k(
                  halves(Element::f16, 192, 128, KeySource::padded_pages, true, ScoreTransform::scaled))),
              in_pairs(in_k(halves(Element::bf16, 128, 128, KeySource::entries, true))),
              in_pairs(in_k(halves(Element::bf16, 576, 512, KeySource::pages, true))),
              in_pairs(by_sequence(in_k(halves(Element::bf16, 192, 128, KeySource::pages, true)))),
              in_pairs(f32_out(in_k(halves(Element::bf16, 192, 128, KeySource::rows, true))))>();
  return kernels;
}

std::span<const EmulatedForward> widest_heads_forwards() {
  constexpr auto widest = [](Element element, KeySource keys, bool split,
                             ScoreTransform transform = ScoreTransform::raw) {
    return halves(element, 576, 512, keys, split, transform);
  };
  static constexpr auto kernels = emulate<
      in_pairs(in_k(widest(Element::bf16, KeySource::rows, true))),
      in_pairs(in_k(widest(Element::f16, KeySource::pages, true))),
      in_k(widest(Element::bf16, KeySource::rows, true)), in_k(widest(Element::f16, KeySource::pages, true)),
      widest(Element::bf16, KeySource::rows, true), widest(Element::bf16, KeySource::pages, true),
      widest(Element::bf16, KeySource::entries, true), widest(Element::bf16, KeySource::padded_pages, true),
      widest(Element::bf16, KeySource::rows, true, ScoreTransform::softcap),
      widest(Element::f16, KeySource::rows, false), widest(Element::f16, KeySource::pages, false),
      widest(Element::f16, KeySource::entries, false),
      widest(Element::f16, KeySource::rows, false, ScoreTransform::scaled),
      with_split_size(widest(Element::bf16, KeySource::rows, true)),
      with_split_size(widest(Element::bf16, KeySource::pages, true)),
      with_split_size(widest(Element::bf16, KeySource::rows, false))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
