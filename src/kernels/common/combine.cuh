// Merges the partial results of split-KV (tile/split.cuh): out = sum of w_i O_i / sum of w_i with
// w_i = exp(LSE_i - max LSE), always from the first keys to the last, so that the bits are the same each
// time. A sink joins the sum here. One warp a row. Tiles that one CTA has computed whole are written already.
// With a fixed split size parts are merged one behind the other instead, as tile/part_merge.cuh says.
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

/// One row of a tile whose partial results are `first`, then the tails of CTAs from `tails` on.
template <ForwardConfig C>
struct CombineRow {
  const ForwardParams& p;
  const int row;  ///< in the tile
  const int first;
  const u32 tails;
  const u32 count;  ///< of partial results
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;

  TANDEM_DEVICE i64 place(u32 i) const {
    const int part = i == 0 ? first : tile::part_of_tail(tails + i - 1);
    return static_cast<i64>(part) * C.tiling.block_m + row;
  }
  /// That of partial result `i`; -inf past the last.
  TANDEM_DEVICE float lse(u32 i) const {
    return i < count ? ptx::load_written(p.part_lse + place(i)) : -ptx::infinity();
  }

  /// The largest LSE. A NaN is found by the sum.
  TANDEM_DEVICE float largest() const {
    float top = -ptx::infinity();
    for (u32 i = static_cast<u32>(lane); i < count; i += warp_size) top = ptx::fmax(top, lse(i));
#pragma unroll
    for (int d = 1; d < warp_size; d *= 2) top = ptx::fmax(top, ptx::shuffle_xor(top, d));
    return top;
  }

  TANDEM_DEVICE void merge(const tile::TileIndex& t, const tile::TileRow& own) {
    tile::Output<C.tiling> output{p, 0, 0};
    const float sink =
        p.sink != nullptr ? ptx::load_global(p.sink + own.head * p.sink_stride) : -ptx::infinity();
    const float largest_part = largest();
    const float top = ptx::fmax(largest_part, sink);
    const float base = top == -ptx::infinity() ? 0.0F : top;
    constexpr int vectors = (C.tiling.head_dim_v + 127) / 128;  // of four columns, a lane
    ptx::Float4 sum[vectors];
#pragma unroll
    for (int v = 0; v < vectors; ++v) sum[v] = {0.0F, 0.0F, 0.0F, 0.0F};
    float total = ptx::exp2((sink - base) * tile::log2_e);
    // Lane i has the weight of every 32nd partial result, so that loads of O wait for no other load.
    for (u32 begin = 0; begin < count; begin += warp_size) {
      const float weights = ptx::exp2((lse(begin + static_cast<u32>(lane)) - base) * tile::log2_e);
      const u32 end = min(count - begin, static_cast<u32>(warp_size));
#pragma unroll 8
      for (u32 i = 0; i < end; ++i) {
        const float weight = ptx::shuffle(weights, static_cast<int>(i));
        total += weight;
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
          const int col = min(v * 128 + lane * 4, C.tiling.head_dim_v - 4);
          const auto o = ptx::load_global(reinterpret_cast<const ptx::Float4*>(
              p.part_out + place(begin + i) * C.tiling.head_dim_v + col));
          sum[v].x = ptx::fma(weight, o.x, sum[v].x);
          sum[v].y = ptx::fma(weight, o.y, sum[v].y);
          sum[v].z = ptx::fma(weight, o.z, sum[v].z);
          sum[v].w = ptx::fma(weight, o.w, sum[v].w);
        }
      }
    }
    // A NaN among the parts' LSE is not their largest, but is in the sum.
    const bool seen = largest_part != -ptx::infinity() || total != total;
    const float factor = seen ? ptx::reciprocal(total) : 0.0F;
    store_combined<C.tiling>(output, t, own, sum, factor,
                             seen ? base + ptx::log2(total) * tile::ln_2 : -ptx::infinity());
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

/// The tiles of such a call, each part_rows / combine_rows CTAs.
template <ForwardConfig C>
TANDEM_DEVICE void combine_splits(const ForwardParams& p) {
  const u32 groups = static_cast<u32>(p.part_rows) / combine_rows;
  const u32 number = ptx::block_index() / groups;
  tile::SplitLine<C.tiling, C.keys, true> line{p};
  tile::TileIndex t;
  u32 start = 0;
  u32 cost = 0;
  if (!line.locate_tile(number, t, start, cost) || cost == 1) return;
  const int row = static_cast<int>((ptx::block_index() - number * groups) * combine_rows +
                                   ptx::thread_index() / warp_size);
  const tile::TileRow own = tile::row_of<C.tiling>(p, t, row);
  ptx::wait_for_previous_grid();
  if (own.query < t.end_q) combine_in_order<C>(p, t, own, row, start, own.query < t.seqlen_q ? cost : 0);
}

/// At least four CTAs an SM: without a number ptxas takes 40 registers a thread, for six of them, and puts 12
/// bytes into local memory.
template <ForwardConfig C>
TANDEM_KERNEL __launch_bounds__(combine_rows* warp_size, 4) combine(const __grid_constant__ ForwardParams p) {
  if constexpr (C.schedule.invariant) return combine_splits<C>(p);
  constexpr u32 groups = C.tiling.block_m / combine_rows;
  const u32 cta = ptx::block_index() / groups + 1;  // of the forward kernel: a tile may cross where it begins
  tile::SplitLine<C.tiling, C.keys> line{p};
  const u32 total = line.total();
  const u32 ctas = min(static_cast<u32>(p.split_ctas), total);
  const auto begin = [&](u32 i) { return tile::share_begin(total, i, ctas); };
  const u32 at = begin(cta);
  if (cta >= ctas) return;
  tile::TileIndex t;
  u32 start = 0;
  u32 cost = 0;
  line.locate(at, t, start, cost);
  // One group of CTAs merges a tile: that of the first share that begins inside it.
  if (at == start || begin(cta - 1) > start) return;
  u32 end = cta + 1;
  while (end < ctas && begin(end) < start + cost) ++end;
  const int row =
      static_cast<int>(ptx::block_index() % groups * combine_rows + ptx::thread_index() / warp_size);
  const tile::TileRow own = tile::row_of<C.tiling>(p, t, row);
  ptx::wait_for_previous_grid();
  if (own.query >= t.end_q) return;
  if (own.query >= t.seqlen_q) {
    CombineRow<C>{p, row, 0, 0, 0}.merge(t, own);
    return;
  }
  CombineRow<C>{p, row, tile::part_of_head(cta - 1), cta, end - cta + 1}.merge(t, own);
}

}  // namespace tandem
