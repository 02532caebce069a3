// Between rows in memory and lanes: row i of a tile becomes lane i, and back, in 4 x 4 blocks of 128 bits, as
// many side by side as a register holds.
#pragma once

#include "cpu/simd/vec.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// Transposes every 4 x 4 block whose rows are the same 128 bits of r0 to r3, in place.
TANDEM_INLINE void transpose_blocks(Vec& r0, Vec& r1, Vec& r2, Vec& r3) {
  const hn::Repartition<double, Lanes> d;
  const auto a = hn::BitCast(d, hn::InterleaveLower(f32_lanes, r0, r1));  // 00 10 01 11
  const auto b = hn::BitCast(d, hn::InterleaveLower(f32_lanes, r2, r3));  // 20 30 21 31
  const auto e = hn::BitCast(d, hn::InterleaveUpper(f32_lanes, r0, r1));  // 02 12 03 13
  const auto f = hn::BitCast(d, hn::InterleaveUpper(f32_lanes, r2, r3));  // 22 32 23 33
  r0 = hn::BitCast(f32_lanes, hn::InterleaveLower(d, a, b));
  r1 = hn::BitCast(f32_lanes, hn::InterleaveUpper(d, a, b));
  r2 = hn::BitCast(f32_lanes, hn::InterleaveLower(d, e, f));
  r3 = hn::BitCast(f32_lanes, hn::InterleaveUpper(d, e, f));
}

/// Stores the 128-bit pieces of `v`, `step` elements from one to the next.
TANDEM_INLINE void store_blocks(Vec v, float* p, std::int64_t step) {
#if HWY_TARGET <= HWY_AVX3
  _mm_storeu_ps(p, _mm512_castps512_ps128(v.raw));
  _mm_storeu_ps(p + step, _mm512_extractf32x4_ps(v.raw, 1));
  _mm_storeu_ps(p + 2 * step, _mm512_extractf32x4_ps(v.raw, 2));
  _mm_storeu_ps(p + 3 * step, _mm512_extractf32x4_ps(v.raw, 3));
#elif HWY_TARGET == HWY_AVX2
  _mm_storeu_ps(p, _mm256_castps256_ps128(v.raw));
  _mm_storeu_ps(p + step, _mm256_extractf128_ps(v.raw, 1));
#else
  static_cast<void>(step);
  hn::StoreU(v, f32_lanes, p);
#endif
}

/// dst[column * dst_stride + i] = src[i * src_stride + column] for `rows` rows of `columns` 32-bit elements.
TANDEM_INLINE void transpose(const float* src, std::int64_t src_stride, int rows, int columns, float* dst,
                             std::int64_t dst_stride) {
  int c = 0;
  for (; c + vec_lanes <= columns; c += vec_lanes) {
    int i = 0;
    for (; i + 4 <= rows; i += 4) {
      const float* s = src + i * src_stride + c;
      Vec r0 = load(s);
      Vec r1 = load(s + src_stride);
      Vec r2 = load(s + 2 * src_stride);
      Vec r3 = load(s + 3 * src_stride);
      transpose_blocks(r0, r1, r2, r3);
      float* t = dst + c * dst_stride + i;
      store_blocks(r0, t, 4 * dst_stride);
      store_blocks(r1, t + dst_stride, 4 * dst_stride);
      store_blocks(r2, t + 2 * dst_stride, 4 * dst_stride);
      store_blocks(r3, t + 3 * dst_stride, 4 * dst_stride);
    }
    for (; i < rows; ++i) {
      for (int j = c; j < c + vec_lanes; ++j) dst[j * dst_stride + i] = src[i * src_stride + j];
    }
  }
  for (; c < columns; ++c) {
    for (int i = 0; i < rows; ++i) dst[c * dst_stride + i] = src[i * src_stride + c];
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
