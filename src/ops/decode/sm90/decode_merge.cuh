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

/// Partial results that are merged. Where they are many, the last CTA of each merged_parts in a row merges
/// these into its own, so that the CTA with the end of the tile has few to read.
template <DecodeConfig C>
struct DecodeConsumer<C>::PartList {
  static constexpr int merged_parts = 8;
  static constexpr int many_parts = 40;
  int first;   ///< the CTA in whose share the tile begins
  int groups;  ///< so many that have been merged already, of merged_parts each, from number 0 on
  int begin;   ///< number of the first of the others
  int count;

  /// The last group of the first `parts` parts.
  static TANDEM_DEVICE PartList group(int first, int parts) {
    return {first, 0, parts - merged_parts, merged_parts};
  }
  /// All of `parts` parts.
  static TANDEM_DEVICE PartList all(int first, int parts) {
    const int groups = parts < many_parts ? 0 : (parts - 1) / merged_parts;
    return {first, groups, groups * merged_parts, groups + parts - groups * merged_parts};
  }
  TANDEM_DEVICE int operator[](int i) const {
    const int number = i < groups ? (i + 1) * merged_parts - 1 : begin + i - groups;
    return number == 0 ? tile::part_of_head(static_cast<u32>(first))
                       : tile::part_of_tail(static_cast<u32>(first + number));
  }
};

/// Waits for the first `count` of the parts, and lowers their flags.
template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::await_flags(const PartList& parts, int count) {
  for (int i = warp * warp_size + lane; i < count; i += threads) ptx::flag_take(flag_of(parts[i]));
  ptx::named_barrier_sync(tile::barrier_consumers, threads);
}

/// Says that a partial result is there, after it has merged others into it where that is its turn.
template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::finish_part(const tile::QueryTile& t) {
  const bool merges = t.all_parts >= PartList::many_parts && t.parts < t.all_parts;
  if (merges && t.parts % PartList::merged_parts == 0) {
    const PartList parts = PartList::group(static_cast<int>(ptx::block_index()) + 1 - t.parts, t.parts);
    await_flags(parts, parts.count - 1);  // the last is its own
#pragma unroll 1
    for (int row = warp; row < p.part_rows; row += decode_warps) merge_row(t.index, row, parts, t.part);
  }
  ptx::named_barrier_sync(tile::barrier_consumers, threads);  // all have written theirs
  if (warp == 0 && lane == 0) ptx::flag_raise(flag_of(t.part));
}

/// Merges the tile that ends in this CTA's share, if there is one.
template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::merge_ending() {
  ptx::named_barrier_sync(tile::barrier_consumers, threads);  // the tile is noted
  const auto& ending = shared.exchange.ending;
  const int count = ptx::load_shared(&ending.parts);
  if (count == 0) return;
  const tile::TileIndex t = ptx::load_shared(&ending.index);
  const PartList parts = PartList::all(static_cast<int>(ptx::block_index()) + 1 - count, count);
  await_flags(parts, parts.count);
#pragma unroll 1
  for (int row = warp; row < p.part_rows; row += decode_warps) merge_row(t, row, parts, tile::whole_tile);
}

/// One row, by one warp: a lane has four columns of every 128. What is merged becomes part `to`, or the
/// result.
template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::merge_row(const tile::TileIndex& t, int row, const PartList& parts,
                                                int to) {
  constexpr int head_dim = C.tiling.head_dim_v;
  constexpr int vectors = (head_dim + 127) / 128;
  const tile::TileRow own = tile::row_of<C.tiling>(p, t, row);
  if (own.query >= t.end_q) return;
  const int count = own.query < t.seqlen_q ? parts.count : 0;
  const auto place = [&](int part) { return static_cast<i64>(part) * decode_rows + row; };
  tile::PartMerge all;
#pragma unroll 1
  for (int i = lane; i < count; i += warp_size) all.take(tile::load_sum(p.part_sums + place(parts[i])));
  const float top = tile::largest_of_lanes(all.reference);
  all.sum = tile::sum_of_lanes(all.sum * tile::RowSum::worth(all.reference, top));
  all.reference = top;

  ptx::Float4 sum[vectors];
#pragma unroll
  for (ptx::Float4& x : sum) x = {0.0F, 0.0F, 0.0F, 0.0F};
  // Each lane finds the weight of a part. So many loads are under way at once that they take hardly longer
  // than one.
  constexpr int ahead = vectors == 1 ? 16 : 8;
#pragma unroll 1
  for (int begin = 0; begin < count; begin += ahead) {
    const int last = count - 1 - begin;
    ptx::Float4 o[ahead][vectors];
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      const float* const from = p.part_out + place(parts[begin + min(i, last)]) * head_dim;
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        o[i][v] = ptx::load_global(
            reinterpret_cast<const ptx::Float4*>(from + min(v * 128 + lane * 4, head_dim - 4)));
      }
    }
    const float reference = tile::load_sum(p.part_sums + place(parts[begin + min(lane, last)])).reference;
    const float weights = lane <= last ? tile::RowSum::worth(reference, top) : 0.0F;
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      const float weight = ptx::shuffle(weights, i);
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        sum[v] = {ptx::fma(weight, o[i][v].x, sum[v].x), ptx::fma(weight, o[i][v].y, sum[v].y),
                  ptx::fma(weight, o[i][v].z, sum[v].z), ptx::fma(weight, o[i][v].w, sum[v].w)};
      }
    }
  }
  if (to != tile::whole_tile) {
    if (count == 0) return;
    if (lane == 0) ptx::store_global<PartSum>(p.part_sums + place(to), all);
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      const int col = v * 128 + lane * 4;
      if (col < head_dim)
        ptx::store_global(reinterpret_cast<ptx::Float4*>(p.part_out + place(to) * head_dim + col), sum[v]);
    }
    return;
  }
  const bool has_sink = p.sink != nullptr;
  const float sink = has_sink ? ptx::load_global(p.sink + own.head * p.sink_stride) : 0.0F;
  float factor = 0.0F;
  const float lse = all.finish(has_sink, sink * tile::log2_e, factor);
  tile::Output<C.tiling> output{{}, p, 0, 0};
  tile::store_merged_row<C.tiling>(output, t, own, sum, factor, lse);
}

}  // namespace tandem
