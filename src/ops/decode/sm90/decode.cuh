// Decoding: attention of tiles of 16 rows, whose time is that of reading K and V. A persistent kernel with
// two CTAs an SM where shared memory allows, so that one reads while the other begins or ends a tile.
//
// A producer warp fills shared memory through TMA, as in the forward kernel. Each of four consumer warps owns
// a quarter of the keys of every block, with its own softmax and its own O of all 16 rows; products are
// mma.sync's, whose 16 rows are a tile's. Warps meet at a tile's end alone, where they add up what each has.
// The result, or with splits the partial result, goes to global memory from there. K and V of 8 bits become
// 16-bit elements in registers. docs/kernels/decode.md has the arithmetic.
#pragma once

#include "ops/decode/config.hpp"
#include "ops/forward/sm90/forward_producer.cuh"
#include "ptx/barrier.cuh"
#include "tile/key_operands.cuh"
#include "tile/logits.cuh"
#include "tile/mask.cuh"
#include "tile/output.cuh"
#include "tile/pingpong.cuh"
#include "tile/row_scales.cuh"
#include "tile/softmax.cuh"

namespace tandem {

// ---- Shared storage ----

template <DecodeConfig C>
struct DecodeShared {
  ForwardShared<C> in;
  /// What the warps exchange at a tile's end: O of a few columns, and each row's reference and sum.
  struct alignas(1024) Exchange {
    float out[decode_warps][decode_rows][decode_row_floats];
    float reference[decode_warps][decode_rows];
    float sum[decode_warps][decode_rows];
  } exchange;
};

// ---- Consumer ----

/// Scales by row of a block's 16 keys that a warp has, those of K in its first lanes and those of V in the
/// others. They are fetched a block ahead.
template <bool used>
struct DecodeRowScales {
  float next_scale = 0.0F;
};
template <>
struct DecodeRowScales<false> {};

template <DecodeConfig C>
struct DecodeConsumer : tile::KeyScale<C.has_byte_keys()>, DecodeRowScales<C.row_scales> {
  using Operands = tile::KeyOperands<C.tiling.element, C.key_type>;
  static constexpr int keys = C.tiling.block_n / decode_warps;  ///< keys of a block that this warp has
  static constexpr int scores = keys / 2;
  static constexpr int outputs = C.tiling.head_dim_v / 2;
  static constexpr int threads = decode_warps * warp_size;
  static_assert(keys % 16 == 0 && (keys == 16 || !C.row_scales));

  const ForwardKernelParams<C>& p;
  DecodeShared<C>& shared;
  const int warp;
  const int lane;
  const tile::FragmentPosition position;
  const float scale_log2;
  typename tile::Ring<C.stages>::Position k_at, v_at;
  typename tile::Ring<C.q_stages>::Position q_at;
  ForwardTiles<C> tiles;

  TANDEM_DEVICE DecodeConsumer(const ForwardKernelParams<C>& params, DecodeShared<C>& s, int warp_, int lane_)
      : p(params),
        shared(s),
        warp(warp_),
        lane(lane_),
        position(lane_),
        scale_log2(tile::scale_log2_of<C.transform>(params)),
        tiles(params, s.in.tiles) {}

  TANDEM_DEVICE void run() {
    tile::QueryTile t;
    while (tiles.template next<false>(t, lane == 0)) compute(t);
  }
  TANDEM_DEVICE void compute(const tile::QueryTile& t);
  TANDEM_DEVICE void step(const tile::QueryTile& t, int block, bool masked, float (&o)[outputs],
                          tile::OnlineSoftmax& softmax);
  TANDEM_DEVICE void add_values(int row, const u32 (&a)[4], float scale, float (&o)[outputs]);
  TANDEM_DEVICE void store(const tile::QueryTile& t, float (&o)[outputs], const tile::OnlineSoftmax& softmax);
  TANDEM_DEVICE void exchange_sums(const tile::OnlineSoftmax& softmax);
  TANDEM_DEVICE float finish_row(const tile::QueryTile& t, const tile::TileRow& at, int row);
  TANDEM_DEVICE void exchange_columns(int begin, const float (&o)[outputs], const float (&weight)[2]);
  TANDEM_DEVICE void store_columns(const tile::QueryTile& t, const tile::TileRow& at, int row, int col,
                                   const ptx::Float2& sum);
  /// The largest of the warps' references of a row.
  TANDEM_DEVICE float reference_of(int row) const {
    float top = -ptx::infinity();
#pragma unroll
    for (int w = 0; w < decode_warps; ++w) {
      top = ptx::fmax(top, ptx::load_shared(&shared.exchange.reference[w][row]));
    }
    return top;
  }

  TANDEM_DEVICE ScoreOptions score_options() const {
    ScoreOptions score = p.score;
    if constexpr (C.has_byte_keys()) score.scale *= this->key_scale;
    return score;
  }
  /// With scales by row: starts to fetch those of this warp's keys of a block.
  TANDEM_DEVICE void load_row_scales(const tile::QueryTile& t, int block) {
    const int key = block * C.tiling.block_n + warp * keys + lane % 16;
    this->next_scale = tile::row_scale<C.keys>(lane < 16 ? p.k_row_scale : p.v_row_scale, p, t.index, key);
  }

  /// Gives a buffer back, of which all lanes have read.
  template <typename Ring, typename Position>
  TANDEM_DEVICE void release(Ring& ring, Position& at) {
    ptx::sync_warp();
    if (lane == 0) ring.release(at);
    at.advance();
  }
};

template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::compute(const tile::QueryTile& t) {
  float o[outputs];
  tile::set_zero(o);
  tile::OnlineSoftmax softmax;
  if (t.blocks.first < t.blocks.end) {
    if constexpr (C.has_byte_keys()) this->key_scale = tile::scale_of(p.k_scale, p, t.index);
    if constexpr (C.row_scales) load_row_scales(t, t.blocks.end - 1);
    shared.in.q_ring[0].wait(q_at);
    if constexpr (C.has_byte_keys()) {
      Operands::arrange_queries(shared.in.q[0][q_at.stage], warp * warp_size + lane, threads);
      ptx::named_barrier_sync(tile::barrier_consumers, threads);
    }
    const int first = tile::first_query<C.tiling>(p, t.index.m, 0);
    const tile::BlockRange inner =
        tile::BlockRange::of<C.tiling.block_n>(t.visible, first, first + tile::queries_of_unit<C.tiling>(p));
    for (int block = t.blocks.end - 1; block >= t.blocks.first; --block) {
      step(t, block, inner.needs_mask(block), o, softmax);
    }
    release(shared.in.q_ring[0], q_at);
  }
  store(t, o, softmax);
}

/// One block of keys, of which this warp has its quarter. Q stays in shared memory: in registers, a quarter
/// of the head dimension, it would leave too few for the rest.
template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::step(const tile::QueryTile& t, int block, bool masked,
                                           float (&o)[outputs], tile::OnlineSoftmax& softmax) {
  const int own = warp * keys;
  const int key = block * C.tiling.block_n + own;
  float row_scale = 1.0F;
  if constexpr (C.row_scales) {
    row_scale = this->next_scale;
    if (block > t.blocks.first) load_row_scales(t, block - 1);
  }
  float s[scores];
  tile::set_zero(s);
  shared.in.k_ring.wait(k_at);
#pragma unroll
  for (int col = 0; col < C.tiling.head_dim_qk; col += Operands::columns) {
    u32 q[Operands::steps][4];
    Operands::load_queries(shared.in.q[0][q_at.stage], col, lane, q);
#pragma unroll
    for (int n = 0; n < keys; n += 16) {
      u32 k[Operands::steps][4];
      Operands::load_keys(shared.in.k[k_at.stage], own + n, col, lane, k);
#pragma unroll
      for (int i = 0; i < Operands::steps; ++i) tile::multiply_pair<C.tiling.element>(s + n / 2, q[i], k[i]);
    }
  }
  release(shared.in.k_ring, k_at);

  if constexpr (C.row_scales) {
#pragma unroll
    for (int i = 0; i < scores; ++i) s[i] *= ptx::shuffle(row_scale, position.col(i / 4) + i % 2);
  }
  tile::transform_scores<C.transform>(s, score_options());
  if (masked) {
    tile::apply_mask(s, t.visible, tile::first_query<C.tiling>(p, t.index.m, 0), key,
                     tile::query_position<C.tiling>(p, position));
  }
  float rescale[2];
  softmax.add_block<true>(s, rescale, scale_log2);
  tile::scale_moved_rows(o, rescale);
  u32 probabilities[scores / 2];
  tile::convert<C.tiling.element>(probabilities, s);

  auto& values = shared.in.v[v_at.stage];
  shared.in.v_ring.wait(v_at);
  // Rows of V past the sequence's end may hold anything, and 0 * NaN is NaN. Without varlen TMA has filled
  // them with zeros.
  const int valid = max(t.index.seqlen_k - key, 0);
  if (C.mask.varlen && valid < keys) {
    values.zero_rows(own + valid, own + keys, lane, warp_size);
    ptx::fence_async_shared();
    ptx::sync_warp();
  }
#pragma unroll
  for (int n = 0; n < keys; n += 16) {
    add_values(own + n, reinterpret_cast<const u32(&)[4]>(probabilities[n / 4]), row_scale, o);
  }
  release(shared.in.v_ring, v_at);
}

/// O += P V of 16 keys, rows of the block from `row` on. `scale`: the lane's, with scales by row.
template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::add_values(int row, const u32 (&a)[4], float scale,
                                                 float (&o)[outputs]) {
  const auto add = [&](const auto&... scales) {
#pragma unroll
    for (int col = 0; col < C.tiling.head_dim_v; col += Operands::columns) {
      u32 v[Operands::steps][4];
      Operands::load_values(shared.in.v[v_at.stage], row, col, lane, v, scales...);
#pragma unroll
      for (int i = 0; i < Operands::steps; ++i)
        tile::multiply_pair<C.tiling.element>(o + (col + 16 * i) / 2, a, v[i]);
    }
  };
  if constexpr (C.row_scales) {
    float scales[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) scales[i / 2][i % 2] = ptx::shuffle(scale, 16 + position.col(i / 2) + i % 2);
    add(scales);
  } else {
    add();
  }
}

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
    weight[h] = ptx::exp2(softmax.reference[h] - tile::OnlineSoftmax::shift(reference_of(position.row(h))));
  }
  const int row = (warp * warp_size + lane) / 8;
  const int col = lane % 8 * 2;
  const tile::TileRow at = tile::row_of<C.tiling>(p, t.index, row);
  const float factor = finish_row(t, at, row);
  const bool empty = factor == 0.0F;  // rows without a result may hold NaN
  float value_scale = 0.0F;
  if constexpr (C.has_byte_keys()) {
    if (t.blocks.first < t.blocks.end) value_scale = tile::scale_of(p.v_scale, p, t.index);
  }
#pragma unroll
  for (int begin = 0; begin < C.tiling.head_dim_v; begin += decode_columns) {
    if (begin > 0) ptx::named_barrier_sync(tile::barrier_consumers, threads);  // the last columns are read
    exchange_columns(begin, o, weight);
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

/// Writes a row's LSE, or the sum of a part of it, and returns what its O is multiplied by: 0 of a row
/// without a result.
template <DecodeConfig C>
TANDEM_DEVICE float DecodeConsumer<C>::finish_row(const tile::QueryTile& t, const tile::TileRow& at,
                                                  int row) {
  tile::OnlineSoftmax all;  // a quad has the sum once
  all.reference[0] = reference_of(row);
  float total = 0.0F;
#pragma unroll
  for (int w = 0; w < decode_warps; ++w) {
    const float worth = ptx::exp2(ptx::load_shared(&shared.exchange.reference[w][row]) -
                                  tile::OnlineSoftmax::shift(all.reference[0]));
    total = ptx::fma(ptx::load_shared(&shared.exchange.sum[w][row]), worth, total);
  }
  all.sum[0] = lane % 4 == 0 ? total : 0.0F;
  const bool used = at.query < t.index.seqlen_q;
  if (used && t.visible.sees_key(at.query)) all.set_infinite(0);
  const tile::RowSum own = all.row(0);
  if (C.schedule.split && t.part != tile::whole_tile) {
    if (used && lane % 8 == 0)
      ptx::store_global<PartSum>(p.part_sums + static_cast<i64>(t.part) * decode_rows + row, own);
    return !used || own.has_seen_nothing() ? 0.0F : 1.0F;
  }
  const bool has_sink = p.sink != nullptr;
  const float sink = has_sink ? ptx::load_global(p.sink + at.head * p.sink_stride) : 0.0F;
  float factor = 0.0F;
  const float lse = own.finish(has_sink, sink * tile::log2_e, factor);
  // Past the end, whatever was computed is no result.
  if (at.query < t.index.end_q && lane % 8 == 0)
    tile::Output<C.tiling>{{}, p, 0, 0}.store_lse(t.index, at.query, at.head, used ? lse : -ptx::infinity());
  return used ? factor : 0.0F;
}

/// Columns [begin, begin + decode_columns) of the warp's O, relative to the rows' common references.
template <DecodeConfig C>
TANDEM_DEVICE void DecodeConsumer<C>::exchange_columns(int begin, const float (&o)[outputs],
                                                       const float (&weight)[2]) {
#pragma unroll
  for (int i = begin / 2; i < (begin + decode_columns) / 2; i += 2) {
    const int h = i / 2 % 2;
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
  if (C.schedule.split && t.part != tile::whole_tile) {
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

// ---- Entry ----

template <DecodeConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), ctas_per_sm(C))
    decode(const __grid_constant__ ForwardKernelParams<C> p) {
  static_assert(sizeof(DecodeShared<C>) == forward_shared_bytes(C));
  auto& shared = *reinterpret_cast<DecodeShared<C>*>(ptx::dynamic_shared());
  const int warp = ptx::warp_index();
  begin_forward<C>(p, shared.in, shared.in);
  if (warp == decode_warps) {
    ForwardLoader<C>(p, shared.in).run();
  } else {
    DecodeConsumer<C>(p, shared, warp, static_cast<int>(ptx::thread_index()) % warp_size).run();
  }
}

}  // namespace tandem
