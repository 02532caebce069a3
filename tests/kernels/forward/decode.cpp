// The kernel `decode`: of rows, entries and pages, of whole tiles and of shared keys, with heads as rows and
// without.
#include "forward/decoding.hpp"

namespace tandem::kernel_tests {
namespace {

/// The widest block, of which a warp has 32 keys, one stage, and no left edge.
constexpr DecodeConfig wide_block() {
  DecodeConfig c = decoding(bf16, 64, rows, true, false);
  c.tiling.block_n = 128;
  c.stages = 1;
  c.q_stages = 1;
  c.mask.local = false;
  return c;
}

}  // namespace

std::span<const EmulatedForward> decode_forwards() {
  static constexpr auto kernels = emulate<
      decoding(bf16, 64, rows, true, true), decoding(f16, 64, rows, true, true),
      decoding(bf16, 64, pages, true, true), decoding(f16, 64, pages, true, true),
      decoding(bf16, 64, entries, true, true), decoding(bf16, 64, padded_pages, true, true),
      decoding(bf16, 64, rows, true, true, softcap), decoding(bf16, 64, pages, true, true, scaled),
      decoding(bf16, 64, rows, true, false), decoding(bf16, 64, rows, false, false),
      decoding(bf16, 64, pages, false, true), decoding(bf16, 192, rows, true, true),
      decoding(bf16, 256, rows, true, true), decoding(bf16, 256, pages, true, false), wide_block(),
      by_sequence(decoding(bf16, 64, pages, true, true)), by_sequence(decoding(bf16, 64, rows, false, false)),
      f32_out(decoding(bf16, 64, rows, true, true)), f32_out(decoding(f16, 64, pages, false, true)),
      f32_out(by_sequence(decoding(bf16, 64, pages, true, true))),
      in_cluster(2, decoding(bf16, 64, rows, false, true)),
      in_cluster(8, decoding(f16, 64, rows, false, false)),
      in_cluster(16, decoding(bf16, 64, rows, false, false)),
      in_cluster(2, decoding(bf16, 64, pages, false, true)),
      in_cluster(2, decoding(bf16, 64, entries, false, true)),
      in_cluster(2, decoding(bf16, 64, padded_pages, false, false)),
      in_cluster(4, decoding(bf16, 192, rows, false, true)),
      in_cluster(2, decoding(bf16, 256, pages, false, false)),
      in_cluster(4, decoding(bf16, 64, rows, false, true, softcap)),
      in_cluster(2, by_sequence(decoding(bf16, 64, pages, false, true))),
      in_cluster(2, f32_out(decoding(bf16, 64, rows, false, false))),
      either(2, decoding(bf16, 64, rows, false, true)), either(4, decoding(f16, 64, rows, false, true)),
      either(2, decoding(bf16, 64, pages, false, true)),
      either(2, by_sequence(decoding(bf16, 192, padded_pages, false, false)))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
