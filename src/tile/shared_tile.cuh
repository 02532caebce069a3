// Matrices of 16-bit elements in shared memory, as TMA writes them and WGMMA reads them.
#pragma once

#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/strips.cuh"

namespace tandem::tile {

/// `rows` x `cols`, cut into strips of 64 (or 32) columns; a strip is `rows` rows of 128 (or 64) bytes,
/// swizzled. One strip is one box of TMA. Base addresses are multiples of 1024.
template <int rows, int cols, int strip = strip_columns(cols)>
struct SharedTile {
  static constexpr int strip_cols = strip;
  static constexpr int strips = cols / strip_cols;
  static constexpr Swizzle swizzle = strip_cols == 64 ? Swizzle::b128 : Swizzle::b64;
  static constexpr u32 row_bytes = strip_cols * 2;
  static constexpr u32 strip_bytes = rows * row_bytes;
  static constexpr int row_count = rows;
  static constexpr u32 bytes = strips * strip_bytes;
  static_assert(cols % strip_cols == 0 && rows % 8 == 0 && rows <= 256);

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

  /// Brings to the L2 what `load` then reads.
  static TANDEM_DEVICE void prefetch(const TensorMap& map, i32 row, i32 head, i32 batch) {
#pragma unroll
    for (int s = 0; s < strips; ++s) ptx::tma_prefetch(map, s * strip_cols, row, head, batch);
  }

  /// Loads by a map whose boxes have fewer rows, into the rows from `first` on.
  TANDEM_DEVICE void load_rows(int first, const TensorMap& map, ptx::Mbarrier& bar, i32 row, i32 head,
                               i32 batch, ptx::CacheHint hint) {
#pragma unroll
    for (int s = 0; s < strips; ++s) {
      ptx::tma_load(data + s * strip_bytes + first * row_bytes, map, bar, s * strip_cols, row, head, batch,
                    hint);
    }
  }

  /// The tile as a K-major operand (rows along M or N, columns along K): WGMMA step `step` takes columns 16 *
  /// step onwards.
  TANDEM_DEVICE ptx::MatrixDescriptor k_major() const {
    return ptx::matrix_descriptor(data, 16, 8 * row_bytes, swizzle);
  }
  static TANDEM_DEVICE constexpr u32 k_major_offset(int step) {
    return static_cast<u32>(step * 16 / strip_cols) * strip_bytes +
           static_cast<u32>(step * 16 % strip_cols) * 2;
  }

  /// The tile as an MN-major operand (rows along K, columns along N): step `step` takes rows 16 * step
  /// onwards.
  TANDEM_DEVICE ptx::MatrixDescriptor mn_major() const {
    return ptx::matrix_descriptor(data, strip_bytes, 8 * row_bytes, swizzle);
  }
  static TANDEM_DEVICE constexpr u32 mn_major_offset(int step) {
    return static_cast<u32>(step) * 16 * row_bytes;
  }

  /// The address of 8 elements from `col`, a multiple of 8, on.
  TANDEM_DEVICE char* address(int row, int col) {
    constexpr int vectors = row_bytes / 16;
    const int vector = col % strip_cols / 8 ^ (row * vectors / 8 & (vectors - 1));
    return data + col / strip_cols * strip_bytes + row * row_bytes + vector * 16;
  }

  /// The address of row `row + lane_row`, column `col + lane_col`: `row` is a multiple of 8, `col` of 8
  /// and more than `lane_col` is, which differ between lanes. The swizzle is an exclusive or, so that what
  /// the lane adds is one register for all rows and columns.
  TANDEM_DEVICE char* address(int row, int col, u32 lane_row, u32 lane_col) {
    constexpr u32 vectors = row_bytes / 16;
    const u32 of_lane = lane_row * row_bytes + (lane_col / 8 ^ (lane_row * vectors / 8 & (vectors - 1))) * 16;
    const auto column = static_cast<u32>(col);
    return data + column / strip_cols * strip_bytes + row * row_bytes +
           (of_lane ^ column % strip_cols / 8 * 16);
  }

  /// Whether this thread finds a NaN or an infinity in its share of rows [first, end), which `threads`
  /// threads divide.
  template <Element element>
  TANDEM_DEVICE bool any_nonfinite(int first, int end, int thread, int threads) const {
    constexpr int vectors = row_bytes / 16;
    u32 sum = 0;
    for (int i = first * vectors + thread; i < end * vectors; i += threads) {
#pragma unroll
      for (int s = 0; s < strips; ++s) {
        const auto vector = ptx::load_shared(reinterpret_cast<const ptx::Vec4*>(data + s * strip_bytes) + i);
        sum = ptx::add_zero_times<element>(sum, vector.x);
        sum = ptx::add_zero_times<element>(sum, vector.y);
        sum = ptx::add_zero_times<element>(sum, vector.z);
        sum = ptx::add_zero_times<element>(sum, vector.w);
      }
    }
    return (sum & 0x7fff7fff) != 0;
  }

  /// Zeroes rows [first, rows) with `threads` threads; the caller fences and synchronises.
  TANDEM_DEVICE void zero_rows(int first, int thread, int threads) {
    zero_rows(first, rows, thread, threads);
  }
  /// Zeroes `count` columns from `col` on, both multiples of a strip's, of rows [first, end).
  TANDEM_DEVICE void zero_rows(int first, int end, int col, int count, int thread, int threads) {
    constexpr int vectors = row_bytes / 16;
    for (int s = col / strip_cols; s < (col + count) / strip_cols; ++s) {
      for (int i = first * vectors + thread; i < end * vectors; i += threads) {
        ptx::store_shared(reinterpret_cast<ptx::Vec4*>(data + s * strip_bytes) + i, ptx::Vec4{0, 0, 0, 0});
      }
    }
  }
  /// Zeroes rows [first, end).
  TANDEM_DEVICE void zero_rows(int first, int end, int thread, int threads) {
    zero_rows_of_strips<strips, strip_bytes, row_bytes>(data, first, end, thread, threads);
  }
};

}  // namespace tandem::tile
