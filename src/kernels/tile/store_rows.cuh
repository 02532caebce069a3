// From accumulators in registers to rows of 16-bit elements in global memory.
#pragma once

#include "kernels/config.hpp"
#include "kernels/ptx/memory.cuh"
#include "kernels/tile/fragment.cuh"

namespace tandem::tile {

/// A tensor's rows of one head, and how they may be written.
struct RowTarget {
  u16* first;    ///< row 0
  i64 stride;    ///< elements from row to row
  int columns;   ///< the true head dimension
  bool vectors;  ///< 16-byte stores are aligned, and columns is a multiple of 8
};

/// Eight columns from `col` on.
TANDEM_DEVICE void store_columns(const RowTarget& target, int row, int col, const u32 (&words)[4]) {
  u16* at = target.first + row * target.stride + col;
  if (target.vectors) {
    if (col < target.columns) {
      ptx::store_global(reinterpret_cast<ptx::Vec4*>(at), ptx::Vec4{words[0], words[1], words[2], words[3]});
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (col + i < target.columns) ptx::store_global(at + i, static_cast<u16>(words[i / 2] >> (16 * (i % 2))));
  }
}

/// Writes a warpgroup's 64 x 2n tile, times `factor`, to rows [row, row + 64) from column `first_col` on, as
/// far as they are before `end`; rows from `used` on get zeros whatever the registers hold. The four lanes of
/// a quad exchange words so that each stores 16 bytes of a row and the quad 64 in a run.
template <Element element, int n>
TANDEM_DEVICE void store_rows(const RowTarget& target, const float (&d)[n], float factor, int row,
                              int first_col, int used, int end, int thread) {
  static_assert(n % 16 == 0);
  const int quad_lane = thread % 4;
  const FragmentPosition position(thread);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int at = row + position.row(h);
#pragma unroll
    for (int g = 0; g < n / 16; ++g) {
      u32 words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * (4 * g + j) + 2 * h;
        words[j] = at < used ? pack<element>(d[i] * factor, d[i + 1] * factor) : 0;
      }
      transpose_quad(words, quad_lane);
      if (at < end) store_columns(target, at, first_col + 8 * (4 * g + quad_lane), words);
    }
  }
}

}  // namespace tandem::tile
