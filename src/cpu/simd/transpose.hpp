// Between rows in memory and lanes: row i of a tile becomes lane i, and back. 4 x 4 blocks in 128-bit
// registers, which every target has; a tile of 64 x 128 costs about 4,000 cycles, below 1 % of the work done
// on it from 512 keys on.
#pragma once

#include "cpu/simd/vec.hpp"

namespace tandem::cpu::TANDEM_TARGET {

using Quad = hn::FixedTag<float, 4>;
using QuadVec = hn::Vec<Quad>;
constexpr Quad quad_lanes{};

/// Transposes the 4 x 4 block whose rows are r0 to r3, in place.
TANDEM_INLINE void transpose_quad(QuadVec& r0, QuadVec& r1, QuadVec& r2, QuadVec& r3) {
  const hn::Repartition<double, Quad> d;
  const auto a = hn::BitCast(d, hn::InterleaveLower(quad_lanes, r0, r1));  // 00 10 01 11
  const auto b = hn::BitCast(d, hn::InterleaveLower(quad_lanes, r2, r3));  // 20 30 21 31
  const auto e = hn::BitCast(d, hn::InterleaveUpper(quad_lanes, r0, r1));  // 02 12 03 13
  const auto f = hn::BitCast(d, hn::InterleaveUpper(quad_lanes, r2, r3));  // 22 32 23 33
  r0 = hn::BitCast(quad_lanes, hn::InterleaveLower(d, a, b));
  r1 = hn::BitCast(quad_lanes, hn::InterleaveUpper(d, a, b));
  r2 = hn::BitCast(quad_lanes, hn::InterleaveLower(d, e, f));
  r3 = hn::BitCast(quad_lanes, hn::InterleaveUpper(d, e, f));
}

/// dst[column * dst_stride + i] = src[i * src_stride + column] for `rows` rows of `columns` 32-bit elements.
TANDEM_INLINE void transpose(const float* src, std::int64_t src_stride, int rows, int columns, float* dst,
                             std::int64_t dst_stride) {
  int i = 0;
  for (; i + 4 <= rows; i += 4) {
    const float* s = src + i * src_stride;
    int c = 0;
    for (; c + 4 <= columns; c += 4) {
      QuadVec r0 = hn::LoadU(quad_lanes, s + c);
      QuadVec r1 = hn::LoadU(quad_lanes, s + src_stride + c);
      QuadVec r2 = hn::LoadU(quad_lanes, s + 2 * src_stride + c);
      QuadVec r3 = hn::LoadU(quad_lanes, s + 3 * src_stride + c);
      transpose_quad(r0, r1, r2, r3);
      float* t = dst + c * dst_stride + i;
      hn::StoreU(r0, quad_lanes, t);
      hn::StoreU(r1, quad_lanes, t + dst_stride);
      hn::StoreU(r2, quad_lanes, t + 2 * dst_stride);
      hn::StoreU(r3, quad_lanes, t + 3 * dst_stride);
    }
    for (; c < columns; ++c) {
      for (int r = 0; r < 4; ++r) dst[c * dst_stride + i + r] = s[r * src_stride + c];
    }
  }
  for (; i < rows; ++i) {
    for (int c = 0; c < columns; ++c) dst[c * dst_stride + i] = src[i * src_stride + c];
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
