// From accumulators in registers to rows of 16-bit elements in global memory.
#pragma once

#include "kernels/config/types.hpp"
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

/// Writes eight columns, of which the first `left` exist.
template <bool vectors>
TANDEM_DEVICE void store_columns(u16* at, int left, const u32 (&words)[4]) {
  if constexpr (vectors) {
    if (left > 0) {
      ptx::store_global(reinterpret_cast<ptx::Vec4*>(at), ptx::Vec4{words[0], words[1], words[2], words[3]});
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < left) ptx::store_global(at + i, static_cast<u16>(words[i / 2] >> (16 * (i % 2))));
    }
  }
}

template <Element element, bool vectors, int n>
TANDEM_DEVICE void store_rows_as(const RowTarget& target, const float (&d)[n], float factor, int row,
                                 int first_col, int used, int end, int thread) {
  const int quad_lane = thread % 4;
  const int col = first_col + 8 * quad_lane;
  const FragmentPosition position(thread);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int at = row + position.row(h);
    u16* const first = target.first + at * target.stride + col;
#pragma unroll
    for (int g = 0; g < n / 16; ++g) {
      u32 words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * (4 * g + j) + 2 * h;
        words[j] = at < used ? pack<element>(d[i] * factor, d[i + 1] * factor) : 0;
      }
      transpose_quad(words, quad_lane);
      if (at < end) store_columns<vectors>(first + 32 * g, target.columns - col - 32 * g, words);
    }
  }
}

/// Writes a warpgroup's 64 x 2n tile, times `factor`, to rows [row, row + 64) from column `first_col` on, as
/// far as they are before `end`; rows from `used` on get zeros whatever the registers hold. The four lanes of
/// a quad exchange words so that each stores 16 contiguous bytes of a row and the quad 64. How rows may be
/// written is tested once: with a branch at each store, shuffles and stores would not overlap.
template <Element element, int n>
TANDEM_DEVICE void store_rows(const RowTarget& target, const float (&d)[n], float factor, int row,
                              int first_col, int used, int end, int thread) {
  static_assert(n % 16 == 0);
  if (target.vectors) {
    store_rows_as<element, true>(target, d, factor, row, first_col, used, end, thread);
  } else {
    store_rows_as<element, false>(target, d, factor, row, first_col, used, end, thread);
  }
}

}  // namespace tandem::tile
