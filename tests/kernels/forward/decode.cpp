// The kernel `decode`: of rows, entries and pages, of whole tiles and of shared keys, with heads as rows and
// without.
#include "forward/decoding.hpp"

namespace tandem::kernel_tests {
namespace {

/// The widest block, of which a warp has 32 keys, one stage, and no left edge.
constexpr DecodeConfig wide_block() {
  DecodeConfig c = decoding(Element::bf16, 64, KeySource::rows, true, false);
  c.tiling.block_n = 128;
  c.stages = 1;
  c.q_stages = 1;
  c.mask.local = false;
  return c;
}

/// CTAs of clusters that share a tile's keys, and merge what they have of it.
constexpr DecodeConfig in_cluster(int ctas, DecodeConfig c) {
  c.schedule = {.split = false, .cluster = ctas};
  return c;
}

}  // namespace

std::span<const EmulatedForward> decode_forwards() {
  static constexpr auto kernels =
      emulate<decoding(Element::bf16, 64, KeySource::rows, true, true),
              decoding(Element::f16, 64, KeySource::rows, true, true),
              decoding(Element::bf16, 64, KeySource::pages, true, true),
              decoding(Element::f16, 64, KeySource::pages, true, true),
              decoding(Element::bf16, 64, KeySource::entries, true, true),
              decoding(Element::bf16, 64, KeySource::padded_pages, true, true),
              decoding(Element::bf16, 64, KeySource::rows, true, true, ScoreTransform::softcap),
              decoding(Element::bf16, 64, KeySource::pages, true, true, ScoreTransform::scaled),
              decoding(Element::bf16, 64, KeySource::rows, true, false),
              decoding(Element::bf16, 64, KeySource::rows, false, false),
              decoding(Element::bf16, 64, KeySource::pages, false, true),
              decoding(Element::bf16, 192, KeySource::rows, true, true),
              decoding(Element::bf16, 256, KeySource::rows, true, true),
              decoding(Element::bf16, 256, KeySource::pages, true, false), wide_block(),
              by_sequence(decoding(Element::bf16, 64, KeySource::pages, true, true)),
              by_sequence(decoding(Element::bf16, 64, KeySource::rows, false, false)),
              f32_out(decoding(Element::bf16, 64, KeySource::rows, true, true)),
              f32_out(decoding(Element::f16, 64, KeySource::pages, false, true)),
              f32_out(by_sequence(decoding(Element::bf16, 64, KeySource::pages, true, true))),
              in_cluster(2, decoding(Element::bf16, 64, KeySource::rows, false, true)),
              in_cluster(8, decoding(Element::f16, 64, KeySource::rows, false, false)),
              in_cluster(16, decoding(Element::bf16, 64, KeySource::rows, false, false)),
              in_cluster(2, decoding(Element::bf16, 64, KeySource::pages, false, true)),
              in_cluster(2, decoding(Element::bf16, 64, KeySource::entries, false, true)),
              in_cluster(2, decoding(Element::bf16, 64, KeySource::padded_pages, false, false)),
              in_cluster(4, decoding(Element::bf16, 192, KeySource::rows, false, true)),
              in_cluster(2, decoding(Element::bf16, 256, KeySource::pages, false, false)),
              in_cluster(4,
                         decoding(Element::bf16, 64, KeySource::rows, false, true, ScoreTransform::softcap)),
              in_cluster(2, by_sequence(decoding(Element::bf16, 64, KeySource::pages, false, true))),
              in_cluster(2, f32_out(decoding(Element::bf16, 64, KeySource::rows, false, false)))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
