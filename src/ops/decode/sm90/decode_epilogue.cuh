// How the consumer warps of the kernel `decode` end a tile: they add up what each has, and in a cluster what
// each CTA has, and write the result, or a part of it.
#pragma once

#include "ops/decode/sm90/decode_consumer.cuh"

namespace tandem {

/// The epilogue: the warps' O, relative to one reference a row, added up and normalised. Each thread takes
/// two columns of a row at a time.
template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::store(const tile::QueryTile& t, float (&o)[outputs],
                                            const tile::OnlineSoftmax& softmax) {
  Operands::put_in_order(o);
  exchange_sums(softmax);
  float weight[2];  // of what this warp has
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    weight[h] = tile::OnlineSoftmax::rescaled(softmax.reference[h], reference_of(position.row(h)));
  }
  float value_scale = 0.0F;
  if constexpr (C.has_byte_keys()) {
    if (t.blocks.first < t.blocks.end) value_scale = tile::scale_of(p.v_scale, p, t.index);
  }
  if constexpr (C.cluster() > 1) {
    if (!C.schedule.split || t.part == tile::tile_of_cluster)
      return store_in_cluster(t, o, weight, value_scale);
  }
  if constexpr (C.cluster() == 1 || C.schedule.split) store_alone(t, o, weight, value_scale);
}

/// The epilogue of a tile, or a part of one, that this CTA has alone.
template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::store_alone(const tile::QueryTile& t, const float (&o)[outputs],
                                                  const float (&weight)[2], float value_scale) {
  const int row = (warp * warp_size + lane) / 8;
  const int col = lane % 8 * 2;
  const tile::TileRow at = tile::row_of<C.tiling>(p, t.index, row);
  const float factor = finish_row(t, at, row, sum_of(row), lane % 8 == 0);
  const bool empty = factor == 0.0F;  // rows without a result may hold NaN
#pragma unroll
  for (int begin = 0; begin < C.tiling.head_dim_v; begin += decode_columns_alone) {
    if (begin > 0) ptx::named_barrier_sync(tile::barrier_consumers, threads);  // the last columns are read
    exchange_columns<decode_columns_alone>(begin, o, weight, decode_rows);
    ptx::named_barrier_sync(tile::barrier_consumers, threads);
    ptx::Float2 sum{0.0F, 0.0F};
#pragma unroll
    for (int w = 0; w < decode_warps; ++w) {
      const auto [x, y] =
          ptx::load_shared(reinterpret_cast<const ptx::Float2*>(&shared.exchange.out[w][row][col]));
      sum = {sum.x + x, sum.y + y};
    }
    if constexpr (C.has_byte_keys()) sum = {sum.x * value_scale, sum.y * value_scale};
    sum = {empty ? 0.0F : sum.x * factor, empty ? 0.0F : sum.y * factor};
    store_columns(t, at, row, begin + col, sum);
  }
  // The next tile's first exchange is of references, which all have read before the barrier above.
  if (C.schedule.split && t.part >= 0) finish_part(t);
}

/// Tells the other warps each row's reference and sum, and waits for theirs.
template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::exchange_sums(const tile::OnlineSoftmax& softmax) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = tile::sum_of_quad(softmax.sum[h]);
    if (lane % 4 != 0) continue;
    ptx::store_shared(&shared.exchange.reference[warp][position.row(h)], softmax.reference[h]);
    ptx::store_shared(&shared.exchange.sum[warp][position.row(h)], sum);
  }
  ptx::named_barrier_sync(tile::barrier_consumers, threads);
}

/// Writes the LSE of a row that has been merged, or the sum of a part of it, where the thread `writes`, and
/// returns what its O is multiplied by: 0 of a row without a result.
template <DecodeConfig C>
TANDEM_DEVICE float DecodeConsumer<C>::finish_row(const tile::QueryTile& t, const tile::TileRow& at, int row,
                                                  tile::RowSum own, bool writes) {
  const bool used = at.query < t.index.seqlen_q;
  if (used && own.reference == -ptx::infinity() && own.sum == 0.0F && t.visible.sees_key(at.query))
    own.sum = -1.0F;  // as OnlineSoftmax::set_infinite has it
  if (C.schedule.split && t.part >= 0) {
    if (used && writes)
      ptx::store_global<PartSum>(p.part_sums + static_cast<i64>(t.part) * decode_rows + row, own);
    return !used || own.has_seen_nothing() ? 0.0F : 1.0F;
  }
  const bool has_sink = p.sink != nullptr;
  const float sink = has_sink ? ptx::load_global(p.sink + at.head * p.sink_stride) : 0.0F;
  float factor = 0.0F;
  const float lse = own.finish(has_sink, sink * tile::log2_e, factor);
  // Past the end, whatever was computed is no result.
  if (at.query < t.index.end_q && writes)
    tile::Output<C.tiling>{{}, p, 0, 0}.store_lse(t.index, at.query, at.head, used ? lse : -ptx::infinity());
  return used ? factor : 0.0F;
}

/// The epilogue in a cluster: the CTA sends what its warps have, four columns of a row a thread at a time,
/// and merges what comes in of its own columns.
template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::store_in_cluster(const tile::QueryTile& t, const float (&o)[outputs],
                                                       const float (&weight)[2], float value_scale) {
  using Parts = ClusterParts<C>;
  constexpr int exchanged = decode_columns(C);  // at a time
  const int thread = warp * warp_size + lane;
  const int rows = p.part_rows;
  cluster.meet();
  if (thread == 0) cluster.expect(rows);
  if (const int row = thread % decode_rows; row < rows) {
    const tile::RowSum own = sum_of(row);
#pragma unroll 1
    for (int to = thread / decode_rows; to < Parts::ctas; to += threads / decode_rows)
      cluster.send_sum(to, row, own);
  }
#pragma unroll
  for (int begin = 0; begin < C.tiling.head_dim_v; begin += exchanged) {
    if (begin > 0) ptx::named_barrier_sync(tile::barrier_consumers, threads);  // the last columns are read
    exchange_columns<exchanged>(begin, o, weight, rows);
    ptx::named_barrier_sync(tile::barrier_consumers, threads);
    constexpr int of_row = exchanged / 4;
    const int col = thread % of_row * 4;
#pragma unroll 1
    for (int row = thread / of_row; row < rows; row += threads / of_row) {
      ptx::Float4 sum{0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
      for (int w = 0; w < decode_warps; ++w) {
        const auto [x, y, z, u] =
            ptx::load_shared(reinterpret_cast<const ptx::Float4*>(&shared.exchange.out[w][row][col]));
        sum = {sum.x + x, sum.y + y, sum.z + z, sum.w + u};
      }
      if constexpr (C.has_byte_keys())
        sum = {sum.x * value_scale, sum.y * value_scale, sum.z * value_scale, sum.w * value_scale};
      cluster.send(row, begin + col, sum);
    }
  }
  ptx::mbarrier_wait(shared.exchange.parts.full[cluster.at.stage], cluster.at.phase);
  constexpr int pairs = Parts::columns / 2;
#pragma unroll 1
  for (int i = thread; i < rows * pairs; i += threads) {
    const int row = i / pairs;
    const int col = i % pairs * 2;
    const auto [own, out] = cluster.merge(row, col);
    const tile::TileRow at = tile::row_of<C.tiling>(p, t.index, row);
    const float factor = finish_row(t, at, row, own, cluster.rank == 0 && col == 0);
    const bool empty = factor == 0.0F;
    store_columns(t, at, row, cluster.rank * Parts::columns + col,
                  {empty ? 0.0F : out.x * factor, empty ? 0.0F : out.y * factor});
  }
  cluster.at.advance();
}

/// Columns [begin, begin + count) of the warp's first `rows` rows of O, relative to the rows' common
/// references.
template <DecodeConfig C>
template <int count>
TANDEM_DEVICE void DecodeConsumer<C>::exchange_columns(int begin, const float (&o)[outputs],
                                                       const float (&weight)[2], int rows) {
#pragma unroll
  for (int i = begin / 2; i < (begin + count) / 2; i += 2) {
    const int h = i / 2 % 2;
    if (position.row(h) >= rows) continue;
    float* const to =
        &shared.exchange.out[warp][position.row(h)][Operands::output_col(position, i / 4) - begin];
    // A row of which this warp has seen no key has an O of 0, whatever a NaN in V has made of it.
    const auto weighted = [&](float x) { return weight[h] == 0.0F ? 0.0F : x * weight[h]; };
    ptx::store_shared(reinterpret_cast<ptx::Float2*>(to), ptx::Float2{weighted(o[i]), weighted(o[i + 1])});
  }
}

/// Writes two columns of a row, from `col` on, of the result or of a partial one.
template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::store_columns(const tile::QueryTile& t, const tile::TileRow& at,
                                                    int row, int col, const ptx::Float2& sum) {
  if (C.schedule.split && t.part >= 0) {
    if (at.query >= t.index.seqlen_q) return;
    const i64 part_row = static_cast<i64>(t.part) * decode_rows + row;
    ptx::store_global(reinterpret_cast<ptx::Float2*>(p.part_out + part_row * C.tiling.head_dim_v + col), sum);
    return;
  }
  if (at.query >= t.index.end_q || col >= p.head_dim_v) return;
  auto* const out = tile::Output<C.tiling>{{}, p, 0, 0}.out_row(t.index, at.query, at.head) + col;
  if constexpr (C.tiling.f32_out) {
    if (p.out_vectors) return ptx::store_global(reinterpret_cast<ptx::Float2*>(out), sum);
    ptx::store_global(out, sum.x);
    if (col + 1 < p.head_dim_v) ptx::store_global(out + 1, sum.y);
  } else {
    const u32 words = tile::pack<C.tiling.element>(sum.x, sum.y);
    if (p.out_vectors) return ptx::store_global(reinterpret_cast<u32*>(out), words);
    ptx::store_global(out, static_cast<u16>(words));
    if (col + 1 < p.head_dim_v) ptx::store_global(out + 1, static_cast<u16>(words >> 16));
  }
}

}  // namespace tandem
