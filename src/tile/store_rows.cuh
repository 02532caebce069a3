// From accumulators in registers to rows in global memory, of 16-bit elements or f32.
#pragma once

#include "config/types.hpp"
#include "ptx/memory.cuh"
#include "tile/fragment.cuh"

namespace tandem::tile {

/// A tensor's rows of one head, u16 or float, and how they may be written.
template <typename T>
struct RowsOf {
  T* first;      ///< row 0
  i64 stride;    ///< elements from row to row
  int columns;   ///< the true head dimension
  bool vectors;  ///< 16-byte stores of 16-bit elements are aligned, and columns is a multiple of 8
};
using RowTarget = RowsOf<u16>;
/// Rows of f32, and whether what is written is added to what is there.
template <>
struct RowsOf<float> {
  float* first;
  i64 stride;
  int columns;
  bool vectors;
  bool added = false;
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

template <bool vectors, bool added, int n>
TANDEM_DEVICE void store_floats_as(const RowsOf<float>& target, const float (&d)[n], float factor, int row,
                                   int first_col, int used, int end, int thread) {
  const FragmentPosition position(thread);
  const int left = target.columns - first_col - position.first_col;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int at = row + position.row(h);
    if (at >= (added ? used : end)) continue;
    const bool is_used = added || at < used;
    float* const first = target.first + at * target.stride + first_col + position.first_col;
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
      ptx::Float2 x{d[4 * j + 2 * h] * factor, d[4 * j + 2 * h + 1] * factor};
      if (!is_used) x = {0.0F, 0.0F};
      if constexpr (vectors) {
        auto* const both = reinterpret_cast<ptx::Float2*>(first + 8 * j);
        if (8 * j >= left) continue;
        if constexpr (added) {
          const ptx::Float2 there = ptx::load_global(both);
          x = {there.x + x.x, there.y + x.y};
        }
        ptx::store_global(both, x);
      } else {
        if (8 * j < left)
          ptx::store_global(first + 8 * j, added ? ptx::load_written(first + 8 * j) + x.x : x.x);
        if (8 * j + 1 < left)
          ptx::store_global(first + 8 * j + 1, added ? ptx::load_written(first + 8 * j + 1) + x.y : x.y);
      }
    }
  }
}

/// Writes it in f32. The four lanes of a quad store 32 contiguous bytes of a row: a sector of L2. What rows
/// are is tested once, here too: otherwise ptxas spills.
template <Element /*element*/, int n>
TANDEM_DEVICE void store_rows(const RowsOf<float>& target, const float (&d)[n], float factor, int row,
                              int first_col, int used, int end, int thread) {
  if (target.vectors && target.added) {
    store_floats_as<true, true>(target, d, factor, row, first_col, used, end, thread);
  } else if (target.vectors) {
    store_floats_as<true, false>(target, d, factor, row, first_col, used, end, thread);
  } else if (target.added) {
    store_floats_as<false, true>(target, d, factor, row, first_col, used, end, thread);
  } else {
    store_floats_as<false, false>(target, d, factor, row, first_col, used, end, thread);
  }
}

}  // namespace tandem::tile
