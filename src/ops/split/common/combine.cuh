// Merges the partial results of split-KV (tile/split.cuh): out = sum of w_i O_i / sum of w_i sum_i with
// w_i = 2^(reference_i - the largest), always in the same order, so that the bits are the same each time. A
// sink joins the sum here. One CTA a row. Tiles that one CTA has computed whole are written already. With a
// fixed split size parts are merged in the order of tile/part_merge.cuh instead, by one warp a row.
#pragma once

#include "ops/split/config.hpp"
#include "ptx/barrier.cuh"
#include "tile/mask.cuh"
#include "tile/merged_row.cuh"
#include "tile/output.cuh"
#include "tile/split.cuh"

namespace tandem {

/// What the kernel before it was launched with, as far as this one reads it.
template <CombineConfig C>
using CombineParams =
    typename Select<C.tiling.gate, ForwardParamsWithGate,
                    typename Select<C.tiling.max_logits, ForwardParamsWithMaxima, ForwardParams>::type>::type;

/// What the threads of a CTA exchange: the weight of each partial result, and O of each group of threads.
template <CombineConfig C>
struct CombineShared {
  static constexpr int warps = combine_rows;
  float weights[combine_parts];
  float largest[warps];
  float totals[warps];
  alignas(16) float out[combine_groups(C.tiling.head_dim_v)][C.tiling.head_dim_v];
};

/// One row of a tile whose partial results are `first`, then the tails of CTAs from `tails` on, or of every
/// second one where clusters of two have shares. The CTA's threads form groups, of which group g adds up
/// partial results g, g + groups, g + 2 * groups and so on; then the groups' sums are added. So many loads
/// are under way at once that they take hardly longer than one.
template <CombineConfig C>
struct CombineRow {
  static constexpr int threads = combine_rows * warp_size;
  static constexpr int head_dim = C.tiling.head_dim_v;
  static constexpr int groups = combine_groups(head_dim);
  static constexpr int lanes =
      threads / groups;  ///< lanes of a group, each with four columns of every `span`
  static constexpr int span = 4 * lanes;
  static constexpr int vectors = (head_dim + span - 1) / span;
  static constexpr u32 ahead = vectors == 1 ? 12 : vectors <= 2 ? 5 : 4;
  static constexpr int shares = combine_parts / threads;  ///< weights that a thread finds
  static constexpr int columns = (head_dim + threads - 1) / threads;
  static constexpr u32 cluster = static_cast<u32>(C.cluster());
  using Parts = ptx::Float4[ahead][vectors];

  const ForwardParams& p;
  CombineShared<C>& shared;
  const int row;  ///< in the tile
  const int first;
  const u32 tails;
  const u32 count;  ///< partial results there are
  const int thread = static_cast<int>(ptx::thread_index());
  const int lane = thread % warp_size;
  const int group = thread / lanes;

  TANDEM_DEVICE i64 place(u32 i) const {
    const int part = i == 0 ? first : tile::part_of_tail(tails + cluster * (i - 1));
    return static_cast<i64>(part) * C.tiling.block_m + row;
  }
  TANDEM_DEVICE int column(int v) const { return v * span + thread % lanes * 4; }

  /// O of this group's partial results from its `begin`-th on; past the last, the last again.
  TANDEM_DEVICE void load(u32 begin, Parts& parts) const {
#pragma unroll
    for (u32 i = 0; i < ahead; ++i) {
      const u32 part = min((begin + i) * groups + static_cast<u32>(group), count - 1);
      const float* const o = p.part_out + place(part) * head_dim;
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        parts[i][v] =
            ptx::load_global(reinterpret_cast<const ptx::Float4*>(o + min(column(v), head_dim - 4)));
      }
    }
  }

  /// Finds the partial results' weights, and returns the row's sum. Both are relative to the largest
  /// reference. The CTA meets within.
  TANDEM_DEVICE tile::RowSum find_weights() {
    float reference[shares];
    tile::PartMerge own;
#pragma unroll
    for (int k = 0; k < shares; ++k) {
      const u32 i = static_cast<u32>(thread + k * threads);
      const tile::PartMerge part = i < count ? tile::load_sum(p.part_sums + place(i)) : tile::PartMerge();
      reference[k] = part.reference;
      own.take(part);
    }
    float top = tile::largest_of_lanes(own.reference);
    if (lane == 0) ptx::store_shared(shared.largest + thread / warp_size, top);
    ptx::sync_block();
#pragma unroll
    for (int w = 0; w < combine_rows; ++w) top = ptx::fmax(top, ptx::load_shared(shared.largest + w));
#pragma unroll
    for (int k = 0; k < shares; ++k) {
      ptx::store_shared(shared.weights + thread + k * threads, tile::RowSum::worth(reference[k], top));
    }
    float total = own.sum * tile::RowSum::worth(own.reference, top);
    total = tile::sum_of_lanes(total);
    if (lane == 0) ptx::store_shared(shared.totals + thread / warp_size, total);
    ptx::sync_block();
    total = ptx::load_shared(shared.totals);
#pragma unroll
    for (int w = 1; w < combine_rows; ++w) total += ptx::load_shared(shared.totals + w);
    return {{top, total}};
  }

  /// Adds up this group's partial results, and hands the sum to the CTA.
  TANDEM_DEVICE void add_parts(Parts& parts) {
    ptx::Float4 sum[vectors];
#pragma unroll
    for (ptx::Float4& x : sum) x = {0.0F, 0.0F, 0.0F, 0.0F};
    for (u32 begin = 0; begin * groups < count; begin += ahead) {
      if (begin > 0) load(begin, parts);
#pragma unroll
      for (u32 i = 0; i < ahead; ++i) {
        const u32 part = (begin + i) * groups + static_cast<u32>(group);
        const float weight = part < count ? ptx::load_shared(shared.weights + part) : 0.0F;
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
          sum[v].x = ptx::fma(weight, parts[i][v].x, sum[v].x);
          sum[v].y = ptx::fma(weight, parts[i][v].y, sum[v].y);
          sum[v].z = ptx::fma(weight, parts[i][v].z, sum[v].z);
          sum[v].w = ptx::fma(weight, parts[i][v].w, sum[v].w);
        }
      }
    }
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      if (column(v) < head_dim) {
        ptx::store_shared(reinterpret_cast<ptx::Float4*>(shared.out[group] + column(v)), sum[v]);
      }
    }
    ptx::sync_block();
  }

  TANDEM_DEVICE void merge(const tile::TileIndex& t, const tile::TileRow& own) {
    // The first loads of O do not wait for those of LSE.
    Parts parts;
    if (count > 0) load(0, parts);
    const float sink =
        p.sink != nullptr ? ptx::load_global(p.sink + own.head * p.sink_stride) : -ptx::infinity();
    const tile::RowSum row_sum = find_weights();
    add_parts(parts);
    float factor = 0.0F;
    const float lse = row_sum.finish(sink != -ptx::infinity(), sink * tile::log2_e, factor);
    tile::Output<C.tiling> output{{}, p, 0, 0};
    if (thread == 0) output.store_lse(t, own.query, own.head, lse, tile::largest_logit(row_sum));
    auto* const out = output.out_row(t, own.query, own.head);
#pragma unroll
    for (int c = 0; c < columns; ++c) {
      const int col = thread + c * threads;
      if (col >= p.head_dim_v) continue;
      float sum = 0.0F;
#pragma unroll
      for (int g = 0; g < groups; ++g) sum += ptx::load_shared(shared.out[g] + col);
      sum *= factor;
      if constexpr (C.tiling.gate) {
        if (factor != 0.0F) sum *= tile::gate_at<C.tiling>(p, t, own.query, own.head, col);
      }
      if constexpr (C.tiling.f32_out) {
        ptx::store_global(out + col, sum);
      } else {
        ptx::store_global(out + col, static_cast<u16>(tile::pack<C.tiling.element>(sum, 0.0F)));
      }
    }
  }
};

/// What has been merged of a row: its state, and four columns of every 128 of its O.
template <int vectors>
struct MergedRow {
  tile::PartMerge merge;
  ptx::Float4 sum[vectors];

  TANDEM_DEVICE void clear() {
    merge = {};
#pragma unroll
    for (ptx::Float4& x : sum) x = {0.0F, 0.0F, 0.0F, 0.0F};
  }
  TANDEM_DEVICE void take(const MergedRow& part) {
    const tile::PartMerge::Weights w = merge.take(part.merge);
#pragma unroll
    for (int v = 0; v < vectors; ++v) sum[v] = tile::PartMerge::add(sum[v], part.sum[v], w, w);
  }
};

/// One row of a tile of a call with a fixed split size, whose parts are [first, first + count); in its
/// sequence the first of them has the number `number`.
template <CombineConfig C>
TANDEM_DEVICE void combine_in_order(const ForwardParams& p, const tile::TileIndex& t,
                                    const tile::TileRow& own, int row, u32 first, u32 count, u32 number) {
  constexpr int vectors = (C.tiling.head_dim_v + 127) / 128;  // of four columns, a lane
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  MergedRow<vectors> of_level[combine_levels];
#pragma unroll
  for (MergedRow<vectors>& merged : of_level) merged.clear();
  while (count > 0) {
    const u32 of_group = min((number + count - 1) % merged_group + 1, count);
    const u32 rest = count - of_group;
#pragma unroll(vectors == 1 ? 4 : 2)
    for (; count > rest; --count) {
      const i64 place = static_cast<i64>(first + count - 1) * p.part_rows + row;
      MergedRow<vectors> part;
      part.merge = tile::load_sum(p.part_sums + place);
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        const int col = min(v * 128 + lane * 4, C.tiling.head_dim_v - 4);
        part.sum[v] = ptx::load_global(
            reinterpret_cast<const ptx::Float4*>(p.part_out + place * C.tiling.head_dim_v + col));
      }
      of_level[0].take(part);
    }
    u32 group = number + count;
#pragma unroll
    for (int level = 0; level + 1 < combine_levels; ++level) {
      if (count > 0 && group % merged_group != 0) break;
      of_level[level + 1].take(of_level[level]);
      of_level[level].clear();
      group /= merged_group;
    }
  }
  MergedRow<vectors>& all = of_level[combine_levels - 1];
  const bool has_sink = p.sink != nullptr;
  const float sink = has_sink ? ptx::load_global(p.sink + own.head * p.sink_stride) : 0.0F;
  float factor = 0.0F;
  const float lse = all.merge.finish(has_sink, sink * tile::log2_e, factor);
  if (factor == 0.0F) all.clear();
  tile::Output<C.tiling> output{{}, p, 0, 0};
  tile::store_merged_row<C.tiling>(output, t, own, all.sum, factor, lse, tile::largest_logit(all.merge));
}

/// Merges a row of a tile of such a call, whose parts are items [start, start + cost) of the line. False if
/// there is no such tile.
template <CombineConfig C>
TANDEM_DEVICE bool combine_splits(const ForwardParams& p, u32 number, int row) {
  tile::SplitLine<C.tiling, C.keys, true> line{p};
  if (p.split_levels > 0) line.set_grain();
  tile::TileIndex t;
  u32 start = 0;
  u32 cost = 0;
  if (!line.locate_tile(number, t, start, cost)) return false;
  if ((cost == 1 && line.grain == 1) || !tile::has_places(p, start, cost)) return true;
  const tile::TileRow own = tile::row_of<C.tiling>(p, t, row);
  ptx::wait_for_previous_grid();
  if (own.query >= t.end_q) return true;
  // Where the tile begins, as tile::SplitQueryTiles finds it.
  const int first_query = t.m * tile::queries_of_tile<C.tiling>(p);
  const tile::Visibility visible{t.seqlen_q, t.seqlen_k, p.window_left, tile::Visibility::unbounded};
  const int first_block = visible.first_key(first_query) / C.tiling.block_n;
  combine_in_order<C>(p, t, own, row, start, own.query < t.seqlen_q ? cost : 0,
                      static_cast<u32>(first_block / line.item_blocks()));
  return true;
}

/// Merges every `groups`-th row of a tile, from row `group` on, if CTAs have shared its keys.
template <CombineConfig C>
TANDEM_DEVICE void combine_shares(const ForwardParams& p, u32 number, u32 group, u32 groups) {
  static_assert(sizeof(CombineShared<C>) == combine_shared_bytes(C));
  auto& shared = *reinterpret_cast<CombineShared<C>*>(ptx::dynamic_shared());
  tile::SplitLine<C.tiling, C.keys, false, C.pairs> line{p};
  const tile::LineLength length = line.length();
  const u32 share = tile::share_of(p, length);
  if (!tile::cuts_tiles(p, length, share)) return;
  tile::TileIndex t;
  u32 start = 0;
  u32 cost = 0;
  // Each CTA of a cluster has one tile of a pair.
  constexpr u32 cluster = static_cast<u32>(C.cluster());
  const u32 rank = number % cluster;
  if (!line.locate_tile(number / cluster, t, start, cost)) return;
  if constexpr (C.pairs) t.head += static_cast<int>(rank);
  const u32 first = start / share;
  const u32 end = (start + cost - 1) / share + 1;
  if (end == first + 1) return;  // one CTA has computed it whole
  ptx::wait_for_previous_grid();
  for (u32 i = group; i < static_cast<u32>(p.part_rows); i += groups) {
    const int row = static_cast<int>(i);
    const tile::TileRow own = tile::row_of<C.tiling>(p, t, row);
    if (own.query >= t.end_q) continue;
    const u32 parts = own.query < t.seqlen_q ? end - first : 0;
    const u32 cta = cluster * first + rank;
    CombineRow<C>{p, shared, row, tile::part_of_head(cta), cta + cluster, parts}.merge(t, own);
  }
}

/// A tile is merged by a CTA for each of its part_rows rows, split_blocks at most, or with a fixed split size
/// for each combine_rows of them. CTAs are small, so that they wait beside those of the kernel before, whose
/// end they need, with the search for their tile behind them. One more CTA only waits for that kernel, since
/// those whose tile is written already do not: what waits for this grid's end sees what both have written.
template <CombineConfig C>
TANDEM_KERNEL __launch_bounds__(combine_rows* warp_size, combine_ctas_per_sm(C))
    combine(const __grid_constant__ CombineParams<C> p) {
  if (ptx::block_index() + 1 == ptx::grid_size()) return ptx::wait_for_previous_grid();
  const u32 rows = static_cast<u32>(p.part_rows);
  const u32 groups = C.invariant ? rows / combine_rows : static_cast<u32>(p.split_blocks);
  u32 number = ptx::block_index() / groups;
  const u32 group = ptx::block_index() - number * groups;
  if constexpr (C.invariant) {
    // Sequences that overlap may have more tiles than the grid has CTAs for: the last ones merge the rest.
    const bool last = p.packed_q && ptx::block_index() + groups + 1 >= ptx::grid_size();
    const int row = static_cast<int>(group * combine_rows + ptx::thread_index() / warp_size);
    while (combine_splits<C>(p, number, row) && last) ++number;
  } else {
    combine_shares<C>(p, number, group, groups);
  }
}

}  // namespace tandem
