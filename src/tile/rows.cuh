// One tile of queries, and what its rows are: queries of one head, or (query, head) where query heads that
// share keys are rows of one tile (Tiling::heads_as_rows). Where tiles are counted, the mask, the loading of
// Q, the epilogue and `combine` ask here; nothing else knows.
//
// With heads as rows each unit of rows (Tiling::unit: a warpgroup's 64, or a tile's 16) holds row_queries
// queries: row r is head r % row_heads of query r / row_heads. Rows that are left, where row_heads does not
// divide the unit, are 0 and no result. Where a group has more heads than a tile takes, it has several tiles,
// of which the last may have fewer heads.
#pragma once

#include "ops/forward/config.hpp"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"

namespace tandem::tile {

/// One tile of queries: block `m` of (head, batch), and the rows of its sequence.
struct TileIndex {
  int m = 0;
  int head = 0;  ///< a query head, or with heads_as_rows the number of a tile's heads, in their order
  int batch = 0;
  int batch_k = 0;  ///< the entry of k and v, where that is chosen by index
  int begin_q = 0;  ///< first row of the sequence in q, and in k
  int begin_k = 0;
  int seqlen_q = 0;  ///< rows in use
  int seqlen_k = 0;
  int end_q = 0;  ///< rows of q, with those that are not in use: they are written too
};

/// Queries in a unit of rows, and in a tile.
template <Tiling T>
TANDEM_DEVICE int queries_of_unit(const ForwardParams& p) {
  if constexpr (T.heads_as_rows) return p.row_queries;
  return T.unit();
}
template <Tiling T>
TANDEM_DEVICE int queries_of_tile(const ForwardParams& p) {
  if constexpr (T.heads_as_rows) return T.block_m / T.unit() * p.row_queries;
  return T.block_m;
}
/// Rows that Q fills, of each unit.
template <Tiling T>
TANDEM_DEVICE int filled_of_unit(const ForwardParams& p) {
  if constexpr (T.heads_as_rows) return p.row_heads * p.row_queries;
  return T.unit();
}

/// The first query of unit `warpgroup` in block `m`.
template <Tiling T>
TANDEM_DEVICE int first_query(const ForwardParams& p, int m, int warpgroup) {
  if constexpr (T.heads_as_rows) return (m * (T.block_m / T.unit()) + warpgroup) * p.row_queries;
  return m * T.block_m + warpgroup * T.unit();
}

/// Query heads [first, end): those of a tile.
struct TileHeads {
  int first;
  int end;
};
template <Tiling T>
TANDEM_DEVICE TileHeads heads_of(const ForwardParams& p, const TileIndex& t) {
  if constexpr (!T.heads_as_rows) return {t.head, t.head + 1};
  const int tiles = p.heads_q / p.heads_kv;  // of a group
  const int kv = t.head / tiles;
  const int first = (t.head - kv * tiles) * p.row_heads;
  return {kv * p.group + first, kv * p.group + min(first + p.row_heads, p.group)};
}

/// Which query row `row` of a unit is, counted from the first one's.
TANDEM_DEVICE int query_in_unit(const ForwardParams& p, int row) {
  return row * p.row_heads_reciprocal >> 16;
}

/// A row's query in its sequence, and its query head.
struct TileRow {
  int query;  ///< `none` where the row is none: past every sequence's end
  int head;
  static constexpr int none = 0x7fffffff;
};
/// Row `row` of the unit that begins with query `first`.
template <Tiling T>
TANDEM_DEVICE TileRow row_at(const ForwardParams& p, const TileIndex& t, int first, int row) {
  if constexpr (!T.heads_as_rows) return {first + row, t.head};
  const TileHeads heads = heads_of<T>(p, t);
  const int query = query_in_unit(p, row);
  const int head = heads.first + row - query * p.row_heads;
  const bool exists = query < p.row_queries && head < heads.end;
  return {exists ? first + query : TileRow::none, exists ? head : heads.first};
}
/// Row `row` of a tile.
template <Tiling T>
TANDEM_DEVICE TileRow row_of(const ForwardParams& p, const TileIndex& t, int row) {
  if constexpr (!T.heads_as_rows) return {t.m * T.block_m + row, t.head};
  return row_at<T>(p, t, first_query<T>(p, t.m, row / T.unit()), row % T.unit());
}

/// A thread's position as the mask is to see it: row(h) counts queries. Rows that are none see what the query
/// behind the last one would.
struct QueryPosition {
  int query[2];
  int first_col;

  TANDEM_DEVICE int row(int h) const { return query[h]; }
};
template <Tiling T>
TANDEM_DEVICE auto query_position(const ForwardParams& p, const FragmentPosition& position) {
  if constexpr (T.heads_as_rows) {
    return QueryPosition{{query_in_unit(p, position.row(0)), query_in_unit(p, position.row(1))},
                         position.first_col};
  } else {
    return position;
  }
}

/// Starts loading a unit's Q, queries from `row` of q on; `queries_bytes` are credited to `full`. Boxes
/// have row_heads heads by row_queries rows of q, in the order of the tile's rows.
template <Tiling T, typename Tile>
TANDEM_DEVICE void load_queries(Tile& to, ptx::Mbarrier& full, const ForwardParams& p, const TileIndex& t,
                                int row) {
  const int batch = p.packed_q ? 0 : t.batch;
  if constexpr (T.heads_as_rows) {
    to.load(p.q, full, heads_of<T>(p, t).first, row, batch, ptx::CacheHint::first);
  } else {
    to.load(p.q, full, row, t.head, batch, ptx::CacheHint::first);
  }
}
template <Tiling T, typename Tile>
TANDEM_DEVICE u32 queries_bytes(const ForwardParams& p) {
  if constexpr (T.heads_as_rows)
    return static_cast<u32>(filled_of_unit<T>(p)) * Tile::row_bytes * Tile::strips;
  return Tile::bytes;
}

/// Clears the rows that no box of Q fills, before the first is loaded: an undefined row might hold NaN, which
/// counts as outgrown in every block. `threads` threads, which synchronise after it.
template <Tiling T, typename Tile>
TANDEM_DEVICE void clear_unfilled(Tile& to, const ForwardParams& p, int thread, int threads) {
  if constexpr (T.heads_as_rows) {
    if (filled_of_unit<T>(p) == T.unit()) return;
    to.zero_rows(filled_of_unit<T>(p), thread, threads);
    ptx::fence_async_shared();
  }
}

}  // namespace tandem::tile
