// The kernel `decode` on keys of 8 bits, which it widens in registers.
#include "forward/decoding.hpp"
#include "forward/mixed.hpp"

namespace tandem::kernel_tests {
namespace {

/// Keys of 8 bits; pages of single rows take 128 columns.
constexpr DecodeConfig decoding_bytes(Element element, OperandType type, int head_dim, KeySource keys,
                                      bool split, bool heads_as_rows, ScoreTransform transform = scaled) {
  DecodeConfig c = decoding(element, head_dim, keys, split, heads_as_rows, transform);
  c.key_type = type;
  return c;
}

/// The widest block, of which a warp has 32 keys.
constexpr DecodeConfig wide_block_of_bytes() {
  DecodeConfig c = decoding_bytes(bf16, e4m3, 64, rows, true, false);
  c.tiling.block_n = 128;
  return c;
}

}  // namespace

std::span<const EmulatedForward> decode_bytes_forwards() {
  static constexpr auto kernels = emulate<
      decoding_bytes(bf16, e4m3, 64, rows, true, true), decoding_bytes(bf16, s8, 64, rows, true, false),
      decoding_bytes(f16, e4m3, 64, rows, false, true), decoding_bytes(bf16, e4m3, 128, pages, true, true),
      decoding_bytes(f16, s8, 128, pages, true, true), decoding_bytes(bf16, s8, 128, entries, false, false),
      decoding_bytes(bf16, e4m3, 128, padded_pages, true, true),
      decoding_bytes(bf16, e4m3, 192, rows, true, true),
      decoding_bytes(bf16, e4m3, 256, pages, true, true, softcap), wide_block_of_bytes(),
      f32_out(by_sequence(decoding_bytes(bf16, e4m3, 64, rows, true, true))),
      by_row(decoding_bytes(bf16, e4m3, 64, rows, true, true)),
      by_row(decoding_bytes(f16, e4m3, 128, pages, true, true)),
      by_row(decoding_bytes(bf16, s8, 128, padded_pages, true, false)),
      by_row(decoding_bytes(bf16, s8, 128, entries, false, true)),
      in_cluster(4, decoding_bytes(bf16, e4m3, 64, rows, false, true)),
      in_cluster(4, decoding_bytes(bf16, e4m3, 128, pages, false, true)),
      in_cluster(2, by_row(decoding_bytes(bf16, s8, 128, entries, false, true))),
      either(2, decoding_bytes(f16, e4m3, 128, pages, false, true))>();
  return kernels;
}

}  // namespace tandem::kernel_tests
