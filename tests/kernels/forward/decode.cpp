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
              f32_out(by_sequence(decoding(Element::bf16, 64, KeySource::pages, true, true)))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
