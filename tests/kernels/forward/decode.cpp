// The kernel `decode`: of rows, entries and pages, of whole tiles and of shared keys, with heads as rows and
// without.
#include "forward/families.hpp"

namespace tandem::kernel_tests {
namespace {

constexpr ForwardConfig decoding(Element element, int head_dim, KeySource keys, bool split,
                                 bool heads_as_rows, ScoreTransform transform = ScoreTransform::raw) {
  return {.tiling = {.element = element,
                     .head_dim_qk = head_dim,
                     .head_dim_v = head_dim == 192 ? 128 : head_dim,
                     .block_m = decode_rows,
                     .block_n = 64,
                     .heads_as_rows = heads_as_rows},
          .q_stages = 2,
          .mask = {.causal = true, .local = true, .varlen = true},
          .keys = keys,
          .transform = transform,
          .schedule = {.pingpong = false, .split = split}};
}

/// The widest block, of which a warp has 32 keys, one stage, and no left edge.
constexpr ForwardConfig wide_block() {
  ForwardConfig c = decoding(Element::bf16, 64, KeySource::rows, true, false);
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
