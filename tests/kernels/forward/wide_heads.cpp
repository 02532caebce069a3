// The kernel `forward_wide`: V beside K and in it, of rows, entries and pages, of whole tiles and of shared
// keys. Narrow heads run the same code in less time; two Configs have the widths that models have.
#include "forward/families.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr LatentConfig halves(Element element, int head_dim_qk, int head_dim_v, KeySource keys, bool split,
                              ScoreTransform transform = raw) {
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
  static constexpr auto kernels = emulate<
      halves(bf16, 128, 128, rows, false), halves(f16, 64, 256, rows, true),
      halves(bf16, 192, 128, pages, true), halves(bf16, 128, 128, entries, false, softcap),
      dense(halves(f16, 128, 128, rows, false), true), dense(halves(bf16, 128, 128, rows, false), false),
      in_k(halves(bf16, 192, 128, rows, true)), in_k(halves(bf16, 192, 128, pages, true)),
      in_k(halves(f16, 192, 128, pages, true), 3), in_k(halves(f16, 192, 128, padded_pages, true, scaled)),
      in_k(halves(bf16, 128, 128, entries, false)), dense(in_k(halves(bf16, 192, 128, rows, false)), true),
      [](LatentConfig c) {
        c.stages = 2;
        return c;
      }(halves(bf16, 64, 128, rows, false)),
      halves(bf16, 512, 512, rows, false), in_k(halves(bf16, 576, 512, pages, true)),
      with_split_size(halves(bf16, 128, 128, rows, false)),
      with_split_size(halves(f16, 192, 256, pages, true)),
      with_split_size(in_k(halves(bf16, 192, 128, pages, true))),
      with_split_size(in_k(halves(bf16, 192, 128, rows, false))),
      with_split_size(dense(halves(bf16, 128, 128, rows, false), true)),
      by_sequence(in_k(halves(bf16, 192, 128, pages, true))),
      f32_out(in_k(halves(bf16, 192, 128, pages, true))),
      f32_out(with_split_size(halves(f16, 128, 256, rows, false))),
      f32_out(by_sequence(halves(bf16, 128, 128, rows, false)))>();
  return kernels;
}

/// Groups of one strip of K and of two, two stages and three.
std::span<const EmulatedForward> pair_forwards() {
  static constexpr auto kernels = emulate<in_pairs(in_k(halves(bf16, 192, 128, rows, true))),
                                          in_pairs(in_k(halves(f16, 192, 128, pages, true), 3)),
                                          in_pairs(in_k(halves(bf16, 320, 256, rows, true))),
                                          in_pairs(in_k(halves(f16, 192, 128, padded_pages, true, scaled))),
                                          in_pairs(in_k(halves(bf16, 128, 128, entries, true))),
                                          in_pairs(in_k(halves(bf16, 576, 512, pages, true))),
                                          in_pairs(by_sequence(in_k(halves(bf16, 192, 128, pages, true)))),
                                          in_pairs(f32_out(in_k(halves(bf16, 192, 128, rows, true))))>();
  return kernels;
}

std::span<const EmulatedForward> widest_heads_forwards() {
  constexpr auto widest = [](Element element, KeySource keys, bool split, ScoreTransform transform = raw) {
    return halves(element, 576, 512, keys, split, transform);
  };
  static constexpr auto kernels =
      emulate<in_pairs(in_k(widest(bf16, rows, true))), in_pairs(in_k(widest(f16, pages, true))),
              in_k(widest(bf16, rows, true)), in_k(widest(f16, pages, true)), widest(bf16, rows, true),
              widest(bf16, pages, true), widest(bf16, entries, true), widest(bf16, padded_pages, true),
              widest(bf16, rows, true, softcap), widest(f16, rows, false), widest(f16, pages, false),
              widest(f16, entries, false), widest(f16, rows, false, scaled),
              with_split_size(widest(bf16, rows, true)), with_split_size(widest(bf16, pages, true)),
              with_split_size(widest(bf16, rows, false))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
