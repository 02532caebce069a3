// Tiles in shared memory that threads fill by cp.async, laid out as TMA would have filled them
// (tile/shared_tile.cuh). Where rows lie in memory is the caller's to say, row by row: in a sequence, in
// pages, or heads of one query. Rows and columns that do not exist become zeros.
#pragma once

#include "tile/keys.cuh"
#include "tile/shared_tile.cuh"

namespace tandem::tile {

/// A row in global memory.
struct SourceRow {
  const u16* data;  ///< the column asked for; not read unless the row exists
  bool exists;
};

/// How `threads` threads divide the rows of tiles: consecutive ones copy 16 bytes each of a strip's row, so
/// that rows are read in whole lines. A thread's rows are equally far apart, and equally swizzled: its
/// addresses are found once, and the others follow by constants.
template <int threads>
struct RowCopier {
  /// Starts copying: `rows_from(row, column)` gives a function of an offset, a constant, that says where
  /// column `column` of row `row + offset` of the tile lies, of which the first `columns` exist; `row` and
  /// `column` are the thread's first.
  template <typename Tile, typename RowsFrom>
  static TANDEM_DEVICE void copy(Tile& to, int columns, RowsFrom rows_from) {
    constexpr int vectors = Tile::row_bytes / 16;
    constexpr int rows = threads / vectors;  // of a pass
    static_assert(rows % 8 == 0);
    const int thread = static_cast<int>(ptx::thread_index_anew());
    const int row = thread / vectors;
    const int vector_col = thread % vectors * 8;
    char* const target = to.address(row, vector_col);
    const auto row_at = rows_from(row, vector_col);
#pragma unroll
    for (int offset = 0; offset < Tile::row_count; offset += rows) {
      if (Tile::row_count % rows != 0 && row + offset >= Tile::row_count) return;
      const SourceRow from = row_at(offset);
#pragma unroll
      for (int s = 0; s < Tile::strips; ++s) {
        ptx::copy_async_or_zero(
            reinterpret_cast<ptx::Vec4*>(target + offset * Tile::row_bytes + s * Tile::strip_bytes),
            reinterpret_cast<const ptx::Vec4*>(from.data + s * Tile::strip_cols),
            from.exists && vector_col < columns - s * Tile::strip_cols);
      }
    }
  }
};

/// Where the keys of a tile's sequence begin in `data`, K or V of 16 bits: key 0, or of pages the first row
/// of the first page.
template <KeySource keys>
TANDEM_DEVICE const u16* key_origin(const ForwardParams& p, const TileIndex& t, const void* data,
                                    const Strides& stride) {
  const u16* const head = static_cast<const u16*>(data) + key_head(p, t) * stride.head;
  if constexpr (in_pages(keys)) return head;
  return head + key_batch<keys>(p, t) * stride.batch + key_row(t, 0) * stride.row;
}

/// Rows that are equally far apart, by their offset from row `row` of those at `rows`; rows [first, end)
/// exist, or all before `end`.
struct DenseRows {
  const char* data;  ///< the data of offset 0
  i64 step;          ///< bytes
  int end;           ///< an offset

  TANDEM_DEVICE DenseRows(const u16* rows, int row, i64 stride, int end_row)
      : data(ptx::forgotten(reinterpret_cast<const char*>(rows) + row * (2 * stride))),
        step(2 * stride),
        end(end_row - row) {}
  TANDEM_DEVICE SourceRow operator()(int offset) const {
    return {reinterpret_cast<const u16*>(data + offset * step), offset < end};
  }
};
struct DenseRowsFromFirst : DenseRows {
  int first;  ///< an offset

  TANDEM_DEVICE DenseRowsFromFirst(const u16* rows, int row, i64 stride, int first_row, int end_row)
      : DenseRows(rows, row, stride, end_row), first(first_row - row) {}
  TANDEM_DEVICE SourceRow operator()(int offset) const {
    SourceRow of = DenseRows::operator()(offset);
    of.exists = of.exists && offset >= first;
    return of;
  }
};

/// The rows of these keys: the counterpart of load_keys and load_pages.
template <KeySource keys>
struct KeyRows {
  const ForwardParams& p;
  const TileIndex& t;
  const u16* origin;
  const Strides& stride;

  /// Key `first` of the sequence and the ones behind it, from `column` on, by their offset from it. Products
  /// with an offset, a constant, are the same in all threads. In bytes: the sum of elements would be doubled
  /// for every row.
  TANDEM_DEVICE auto from(int first, int column) const {
    if constexpr (in_pages(keys)) {
      return [*this, first, column](int offset) {
        const int key = first + offset;
        const bool exists = key < t.seqlen_k;
        const int row = keys == KeySource::padded_pages ? t.begin_k + key : key;
        const int number = row / p.pages.page_size;
        const int page = exists ? page_at(p.pages, t.batch, number) : -1;
        return SourceRow{
            origin + column + page * stride.batch + (row - number * p.pages.page_size) * stride.row,
            page >= 0};
      };
    } else {
      return DenseRows(origin + column, first, stride.row, t.seqlen_k);
    }
  }
};

/// Where column `column` of row `row` of a tile of queries lies in q.
template <Tiling T>
TANDEM_DEVICE SourceRow query_row_at(const ForwardParams& p, const TileIndex& t, int row, int column) {
  const TileRow at = row_of<T>(p, t, row);
  const bool exists = at.query < t.seqlen_q;
  const i64 of_q = t.begin_q + static_cast<i64>(exists ? at.query : 0);
  return {static_cast<const u16*>(p.q_data) + (p.packed_q ? 0 : t.batch) * p.q_stride.batch +
              at.head * p.q_stride.head + of_q * p.q_stride.row + column,
          exists};
}

}  // namespace tandem::tile
