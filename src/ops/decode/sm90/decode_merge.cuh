// How the kernel `decode` merges the partial results of a tile (tile/split.cuh): out = sum of w_i O_i / sum
// of w_i sum_i with w_i = 2^(reference_i - the largest), always in the same order, so that the bits are the
// same each time. The CTA in whose share the tile ends does it, behind the rest of its share, when the CTAs
// before it are about to end, too.
//
// A CTA waits for CTAs of lower numbers alone, which have begun before it or with it: however few CTAs the
// device has room for, the lowest of those that have not ended waits for nobody.
#pragma once

#include "ops/decode/sm90/decode_consumer.cuh"
#include "tile/merged_row.cuh"
#include "tile/part_merge.cuh"

namespace tandem {

template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::merge_parts() {
  ptx::named_barrier_sync(tile::barrier_consumers, threads);  // the tile is noted
  const auto& ending = shared.exchange.ending;
  const int count = ptx::load_shared(&ending.parts);
  if (count == 0) return;
  const tile::TileIndex t = ptx::load_shared(&ending.index);
  const int first = static_cast<int>(ptx::block_index()) + 1 - count;  // the CTA that has its begin
  for (int i = warp * warp_size + lane; i < count; i += threads) ptx::flag_take(flag_of(part_of(first, i)));
  ptx::named_barrier_sync(tile::barrier_consumers, threads);
#pragma unroll 1
  for (int row = warp; row < p.part_rows; row += decode_warps) merge_row(t, row, first, count);
}

/// One row, by one warp: a lane has four columns of every 128.
template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::merge_row(const tile::TileIndex& t, int row, int first, int count) {
  constexpr int head_dim = C.tiling.head_dim_v;
  constexpr int vectors = (head_dim + 127) / 128;
  const tile::TileRow own = tile::row_of<C.tiling>(p, t, row);
  if (own.query >= t.end_q) return;
  if (own.query >= t.seqlen_q) count = 0;
  const auto place = [&](int i) { return static_cast<i64>(part_of(first, i)) * decode_rows + row; };
  tile::PartMerge all;
#pragma unroll 1
  for (int i = lane; i < count; i += warp_size) all.take(tile::load_sum(p.part_sums + place(i)));
  const float top = tile::largest_of_lanes(all.reference);
  all.sum = tile::sum_of_lanes(all.sum * tile::RowSum::worth(all.reference, top));
  all.reference = top;

  ptx::Float4 sum[vectors];
#pragma unroll
  for (ptx::Float4& x : sum) x = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll(vectors == 1 ? 8 : 4)
  for (int i = 0; i < count; ++i) {
    const i64 at = place(i);
    const float weight = tile::RowSum::worth(tile::load_sum(p.part_sums + at).reference, top);
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      const int col = min(v * 128 + lane * 4, head_dim - 4);
      const ptx::Float4 o =
          ptx::load_global(reinterpret_cast<const ptx::Float4*>(p.part_out + at * head_dim + col));
      sum[v] = {ptx::fma(weight, o.x, sum[v].x), ptx::fma(weight, o.y, sum[v].y),
                ptx::fma(weight, o.z, sum[v].z), ptx::fma(weight, o.w, sum[v].w)};
    }
  }
  const bool has_sink = p.sink != nullptr;
  const float sink = has_sink ? ptx::load_global(p.sink + own.head * p.sink_stride) : 0.0F;
  float factor = 0.0F;
  const float lse = all.finish(has_sink, sink * tile::log2_e, factor);
  tile::Output<C.tiling> output{{}, p, 0, 0};
  tile::store_merged_row<C.tiling>(output, t, own, sum, factor, lse);
}

}  // namespace tandem
