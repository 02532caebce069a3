// Matrices of 8-bit values in shared memory, as TMA writes them and WGMMA reads them.
#pragma once

#include "ops/eight_bit/config.hpp"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma_bytes.cuh"
#include "tile/strips.cuh"

namespace tandem::tile {

/// `rows` x `cols`, K-major, cut into swizzled strips of 128 (or 64) columns. One strip is one TMA box. If
/// the last strip has more columns than are left (96), TMA fills them with zeros and nothing reads them.
template <int rows, int cols>
struct ByteTile {
  static constexpr int strip_cols = byte_strip_columns(cols);
  static constexpr int strips = (cols + strip_cols - 1) / strip_cols;
  static constexpr Swizzle swizzle = strip_cols == 128 ? Swizzle::b128 : Swizzle::b64;
  static constexpr u32 strip_bytes = rows * strip_cols;
  static constexpr int row_count = rows;
  static constexpr u32 bytes = strips * strip_bytes;
  static_assert(cols % 32 == 0 && rows % 8 == 0 && rows <= 256);

  alignas(1024) char data[bytes];

  /// Starts loading rows [row, row + rows), columns from `col` on, of (head, batch); its `bytes` are credited
  /// to `bar`.
  TANDEM_DEVICE void load(const TensorMap& map, ptx::Mbarrier& bar, i32 row, i32 head, i32 batch,
                          ptx::CacheHint hint, i32 col = 0) {
#pragma unroll
    for (int s = 0; s < strips; ++s) {
      ptx::tma_load(data + s * strip_bytes, map, bar, col + s * strip_cols, row, head, batch, hint);
    }
  }

  /// Loads by a map whose boxes have fewer rows, into the rows from `first` on.
  TANDEM_DEVICE void load_rows(int first, const TensorMap& map, ptx::Mbarrier& bar, i32 row, i32 head,
                               i32 batch, ptx::CacheHint hint) {
#pragma unroll
    for (int s = 0; s < strips; ++s) {
      ptx::tma_load(data + s * strip_bytes + first * strip_cols, map, bar, s * strip_cols, row, head, batch,
                    hint);
    }
  }

  /// Offset of element (row, col). The 16 elements from a column that is a multiple of 16 on are contiguous.
  static TANDEM_DEVICE u32 place(int row, int col) {
    const u32 at = static_cast<u32>(col / strip_cols) * strip_bytes +
                   static_cast<u32>(row * strip_cols + col % strip_cols);
    return at ^ (at >> 7 & (strip_cols / 16 - 1)) << 4;
  }
  /// Zeroes rows [first, end) with `threads` threads; the caller fences and synchronises.
  TANDEM_DEVICE void zero_rows(int first, int end, int thread, int threads) {
    zero_rows_of_strips<strips, strip_bytes, strip_cols>(data, first, end, thread, threads);
  }

  /// Four elements of `row` from `col` (a multiple of 4) on.
  TANDEM_DEVICE u32 word(int row, int col) const {
    return ptx::load_shared(reinterpret_cast<const u32*>(data + place(row, col)));
  }

  /// The tile from row `first_row` (a multiple of 8) on as an operand; WGMMA step `step` takes columns 32 *
  /// step onwards.
  TANDEM_DEVICE ptx::MatrixDescriptor operand() const {
    return ptx::matrix_descriptor(data, 16, 8 * strip_cols, swizzle);
  }
  static TANDEM_DEVICE constexpr u32 offset(int step, int first_row = 0) {
    return static_cast<u32>(step * 32 / strip_cols) * strip_bytes + static_cast<u32>(step * 32 % strip_cols) +
           static_cast<u32>(first_row * strip_cols);
  }
};

}  // namespace tandem::tile
