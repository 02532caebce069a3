// Scores of quantized values by ordinary arithmetic. They serve the rare tile whose scores are needed again
// after exponentials have overwritten them: the tensor cores would need all warps of the warpgroup for it.
#pragma once

#include "ptx/eight_bit.cuh"
#include "tile/byte_tile.cuh"
#include "tile/fragment.cuh"

namespace tandem::tile {

/// The four 8-bit values of a word as f32.
template <Bytes bytes>
TANDEM_DEVICE void decode(u32 word, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 code = word >> (8 * i) & 0xFFU;
    if constexpr (bytes == Bytes::e4m3) {
      // The exponent's bias is 120 less than that of f32; subnormal e4m3 values become subnormal numbers
      // first.
      const float value = ptx::float_of((code & 0x80U) << 24 | (code & 0x7FU) << 20) * 0x1p120F;
      x[i] = (code & 0x7FU) == 0x7FU ? ptx::quiet_nan() : value;
    } else {
      x[i] = static_cast<float>(static_cast<i32>(code << 24) >> 24);
    }
  }
}

/// This thread's scores of 64 queries and the tile's keys, laid out as WGMMA's accumulators.
template <Bytes bytes, int head_dim, typename Queries, typename Keys, int n>
TANDEM_DEVICE void plain_scores(float (&s)[n], const Queries& q, const Keys& k,
                                const FragmentPosition& position) {
#pragma unroll
  for (int i = 0; i < n; ++i) s[i] = 0.0F;
#pragma unroll 1
  for (int col = 0; col < head_dim; col += 4) {
    float a[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) decode<bytes>(q.word(position.row(h), col), a[h]);
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float b[4];
        decode<bytes>(k.word(position.col(j) + e, col), b);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[4 * j + e] = ptx::fma(a[0][i], b[i], s[4 * j + e]);
          s[4 * j + 2 + e] = ptx::fma(a[1][i], b[i], s[4 * j + 2 + e]);
        }
      }
    }
  }
}

}  // namespace tandem::tile
