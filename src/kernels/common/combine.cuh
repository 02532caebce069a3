// Merges the partial results of split-KV (tile/split.cuh): out = sum of w_i O_i / sum of w_i with
// w_i = exp(LSE_i - max LSE), always from the first keys to the last, so that the bits are the same each
// time. A sink joins the sum here. One CTA a row. Tiles that one CTA has computed whole are written already.
// With a fixed split size parts are merged one behind the other instead, as tile/part_merge.cuh says, by one
// warp a row.
#pragma once

#include "kernels/config/forward.hpp"
#include "kernels/ptx/barrier.cuh"
#include "kernels/tile/output.cuh"
#include "kernels/tile/split.cuh"

namespace tandem {

/// Writes a row, of which each lane has four columns of every 128.
template <Tiling T, int vectors>
TANDEM_DEVICE void store_combined(tile::Output<T>& output, const tile::TileIndex& t, const tile::TileRow& row,
                                  const ptx::Float4 (&sum)[vectors], float factor, float lse) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  if (lane == 0) output.store_lse(t, row.query, row.head, lse);
  u16* const out = output.out_row(t, row.query, row.head);
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    const int col = v * 128 + lane * 4;
    const u32 words[2] = {tile::pack<T.element>(sum[v].x * factor, sum[v].y * factor),
                          tile::pack<T.element>(sum[v].z * factor, sum[v].w * factor)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (col + i < output.p.head_dim_v) {
        ptx::store_global(out + col + i, static_cast<u16>(words[i / 2] >> (16 * (i % 2))));
      }
    }
  }
}

/// One row of a tile whose partial results are `first`, then the tails of CTAs from `tails` on. A CTA merges
/// it, each thread one column, or two of heads wider than 128: so many loads of a thread are under way at
/// once that they take hardly longer than one.
template <ForwardConfig C>
struct CombineRow {
  static constexpr int threads = combine_rows * warp_size;
  static constexpr int columns = (C.tiling.head_dim_v + threads - 1) / threads;
  static constexpr u32 ahead = 16 / columns;
  using Parts = float[ahead][columns];

  const ForwardParams& p;
  const int row;  ///< in the tile
  const int first;
  const u32 tails;
  const u32 count;  ///< of partial results
  const int thread = static_cast<int>(ptx::thread_index());
  const int lane = thread % warp_size;

  TANDEM_DEVICE i64 place(u32 i) const {
    const int part = i == 0 ? first : tile::part_of_tail(tails + i - 1);
    return static_cast<i64>(part) * C.tiling.block_m + row;
  }
  /// That of partial result `i`; -inf past the last.
  TANDEM_DEVICE float lse(u32 i) const {
    return i < count ? ptx::load_written(p.part_lse + place(i)) : -ptx::infinity();
  }
  /// O of the partial results from `begin` on; past the last, the last again.
  TANDEM_DEVICE void load(u32 begin, Parts& parts) const {
#pragma unroll
    for (u32 i = 0; i < ahead; ++i) {
      const float* const o = p.part_out + place(min(begin + i, count - 1)) * C.tiling.head_dim_v;
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        parts[i][c] = ptx::load_global(o + min(thread + c * threads, C.tiling.head_dim_v - 1));
      }
    }
  }
  /// The largest LSE, of which lane i has `own`, that of partial result i. A NaN is found by the sum.
  TANDEM_DEVICE float largest(float own) const {
    float top = own;
    for (u32 i = static_cast<u32>(lane) + warp_size; i < count; i += warp_size) top = ptx::fmax(top, lse(i));
#pragma unroll
    for (int d = 1; d < warp_size; d *= 2) top = ptx::fmax(top, ptx::shuffle_xor(top, d));
    return top;
  }

  TANDEM_DEVICE void merge(const tile::TileIndex& t, const tile::TileRow& own) {
    // The first loads of O do not wait for those of LSE.
    float part_lse = lse(static_cast<u32>(lane));
    Parts parts;
    if (count > 0) load(0, parts);
    const float sink =
        p.sink != nullptr ? ptx::load_global(p.sink + own.head * p.sink_stride) : -ptx::infinity();
    const float largest_part = largest(part_lse);
    const float top = ptx::fmax(largest_part, sink);
    const float base = top == -ptx::infinity() ? 0.0F : top;
    float sum[columns];
#pragma unroll
    for (float& x : sum) x = 0.0F;
    float total = ptx::exp2((sink - base) * tile::log2_e);
    for (u32 begin = 0; begin < count; begin += ahead) {
      if (begin > 0) load(begin, parts);
      if (begin > 0 && begin % warp_size == 0) part_lse = lse(begin + static_cast<u32>(lane));
      const float weights = ptx::exp2((part_lse - base) * tile::log2_e);
#pragma unroll
      for (u32 i = 0; i < ahead; ++i) {
        // Past the last partial result the weight is 0, and O the last one's.
        const float weight = ptx::shuffle(weights, static_cast<int>((begin + i) % warp_size));
        total += weight;
#pragma unroll
        for (int c = 0; c < columns; ++c) sum[c] = ptx::fma(weight, parts[i][c], sum[c]);
      }
    }
    // A NaN among the parts' LSE is not their largest, but is in the sum.
    const bool seen = largest_part != -ptx::infinity() || total != total;
    const float factor = seen ? ptx::reciprocal(total) : 0.0F;
    tile::Output<C.tiling> output{p, 0, 0};
    if (thread == 0) {
      output.store_lse(t, own.query, own.head,
                       seen ? base + ptx::log2(total) * tile::ln_2 : -ptx::infinity());
    }
    u16* const out = output.out_row(t, own.query, own.head);
#pragma unroll
    for (int c = 0; c < columns; ++c) {
      const int col = thread + c * threads;
      if (col >= p.head_dim_v) continue;
      ptx::store_global(out + col, static_cast<u16>(tile::pack<C.tiling.element>(sum[c] * factor, 0.0F)));
    }
  }
};

/// One row of a tile of a call with a fixed split size, whose parts are [first, first + count).
template <ForwardConfig C>
TANDEM_DEVICE void combine_in_order(const ForwardParams& p, const tile::TileIndex& t,
                                    const tile::TileRow& own, int row, u32 first, u32 count) {
  constexpr int vectors = (C.tiling.head_dim_v + 127) / 128;  // of four columns, a lane
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  tile::Output<C.tiling> output{p, 0, 0};
  tile::PartMerge merge;
  ptx::Float4 sum[vectors];
#pragma unroll
  for (int v = 0; v < vectors; ++v) sum[v] = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll 4
  for (u32 i = count; i > 0; --i) {
    const i64 place = static_cast<i64>(first + i - 1) * p.part_rows + row;
    const tile::PartMerge::Weights w = merge.take(ptx::load_written(p.part_lse + place));
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      const int col = min(v * 128 + lane * 4, C.tiling.head_dim_v - 4);
      const auto o = ptx::load_global(
          reinterpret_cast<const ptx::Float4*>(p.part_out + place * C.tiling.head_dim_v + col));
      sum[v].x = tile::PartMerge::add(sum[v].x, o.x, w);
      sum[v].y = tile::PartMerge::add(sum[v].y, o.y, w);
      sum[v].z = tile::PartMerge::add(sum[v].z, o.z, w);
      sum[v].w = tile::PartMerge::add(sum[v].w, o.w, w);
    }
  }
  const bool has_sink = p.sink != nullptr;
  const float sink = has_sink ? ptx::load_global(p.sink + own.head * p.sink_stride) : 0.0F;
  float factor = 0.0F;
  const float lse = merge.finish(has_sink, sink, factor);
  if (factor == 0.0F) {
#pragma unroll
    for (int v = 0; v < vectors; ++v) sum[v] = {0.0F, 0.0F, 0.0F, 0.0F};
  }
  store_combined<C.tiling>(output, t, own, sum, factor, lse);
}

/// Merges a row of a tile of such a call, whose splits are items [start, start + count) of the line.
template <ForwardConfig C>
TANDEM_DEVICE void combine_splits(const ForwardParams& p, u32 number, int row) {
  tile::SplitLine<C.tiling, C.keys, true> line{p};
  tile::TileIndex t;
  u32 start = 0;
  u32 cost = 0;
  if (!line.locate_tile(number, t, start, cost) || cost == 1) return;
  const tile::TileRow own = tile::row_of<C.tiling>(p, t, row);
  ptx::wait_for_previous_grid();
  if (own.query < t.end_q) combine_in_order<C>(p, t, own, row, start, own.query < t.seqlen_q ? cost : 0);
}

/// The CTA in whose share block `at` of a line of `total` blocks lies.
TANDEM_DEVICE u32 owner_of(u32 at, u32 total, u32 ctas) {
  u32 cta =
      min(static_cast<u32>(static_cast<float>(at) / static_cast<float>(total) * static_cast<float>(ctas)),
          ctas - 1);
  while (cta > 0 && tile::share_begin(total, cta, ctas) > at) --cta;
  while (cta + 1 < ctas && tile::share_begin(total, cta + 1, ctas) <= at) ++cta;
  return cta;
}

/// A tile is merged by a CTA for each of its part_rows rows, combine_ctas at most, or with a fixed split size
/// for each combine_rows of them. CTAs are small, so that they wait beside those of the kernel before, whose
/// end they need, with the search for their tile behind them.
template <ForwardConfig C>
TANDEM_KERNEL __launch_bounds__(combine_rows* warp_size, 7) combine(const __grid_constant__ ForwardParams p) {
  const u32 rows = static_cast<u32>(p.part_rows);
  const u32 groups = C.schedule.invariant ? rows / combine_rows : min(rows, static_cast<u32>(combine_ctas));
  const u32 number = ptx::block_index() / groups;
  const u32 group = ptx::block_index() - number * groups;
  if constexpr (C.schedule.invariant) {
    return combine_splits<C>(p, number,
                             static_cast<int>(group * combine_rows + ptx::thread_index() / warp_size));
  }
  tile::SplitLine<C.tiling, C.keys> line{p};
  const u32 total = line.total();
  tile::TileIndex t;
  u32 start = 0;
  u32 cost = 0;
  if (!line.locate_tile(number, t, start, cost)) return;
  const u32 ctas = min(static_cast<u32>(p.split_ctas), total);
  const auto begin = [&](u32 i) { return tile::share_begin(total, i, ctas); };
  const u32 cta = owner_of(start, total, ctas);
  u32 end = cta + 1;
  while (end < ctas && begin(end) < start + cost) ++end;
  if (end == cta + 1) return;  // one CTA has computed it whole
  ptx::wait_for_previous_grid();
  for (u32 i = group; i < rows; i += groups) {
    const int row = static_cast<int>(i);
    const tile::TileRow own = tile::row_of<C.tiling>(p, t, row);
    if (own.query >= t.end_q) continue;
    const u32 parts = own.query < t.seqlen_q ? end - cta : 0;
    CombineRow<C>{p, row, tile::part_of_head(cta), cta + 1, parts}.merge(t, own);
  }
}

}  // namespace tandem
