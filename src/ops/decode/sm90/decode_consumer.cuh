// The shared storage of the kernel `decode`, and its consumer warps: products, masks and softmax of blocks of
// keys. decode_epilogue.cuh has what they do at a tile's end.
#pragma once

#include "ops/decode/config.hpp"
#include "ops/decode/sm90/cluster_parts.cuh"
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

/// The tile in parts that ends in the CTA's share, if there is one: it is merged behind all others.
template <bool used>
struct EndingTile {
  tile::TileIndex index;
  int parts;
  TANDEM_DEVICE void init() { ptx::store_shared(&parts, 0); }
};
template <>
struct EndingTile<false> {
  TANDEM_DEVICE void init() {}
};

template <DecodeConfig C>
struct DecodeShared {
  ForwardShared<C> in;
  /// What the warps exchange at a tile's end: O of a few columns, and each row's reference and sum.
  struct alignas(1024) Exchange {
    float out[decode_warps][decode_rows][decode_row_floats(C)];
    float reference[decode_warps][decode_rows];
    float sum[decode_warps][decode_rows];
    [[no_unique_address]] EndingTile<C.schedule.split> ending;
    [[no_unique_address]] ClusterParts<C> parts;
  } exchange;

  TANDEM_DEVICE void init() {
    exchange.ending.init();
    exchange.parts.init();
    in.init();
  }
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
  [[no_unique_address]] ClusterMerge<C> cluster;

  TANDEM_DEVICE DecodeConsumer(const ForwardKernelParams<C>& params, DecodeShared<C>& s, int warp_, int lane_)
      : p(params),
        shared(s),
        warp(warp_),
        lane(lane_),
        position(lane_),
        scale_log2(tile::scale_log2_of<C.transform>(params)),
        tiles(params, s.in.tiles),
        cluster(s.exchange.parts) {}

  TANDEM_DEVICE void run() {
    tile::QueryTile t;
    while (tiles.template next<false>(t, lane == 0)) {
      if constexpr (C.schedule.split) {
        if (t.parts > 0 && t.parts == t.all_parts && warp == 0 && lane == 0) {
          ptx::store_shared(&shared.exchange.ending.index, t.index);
          ptx::store_shared(&shared.exchange.ending.parts, t.parts);
        }
      }
      compute(t);
    }
    if constexpr (C.schedule.split) merge_ending();
    cluster.meet();
  }
  TANDEM_DEVICE void compute(const tile::QueryTile& t);
  TANDEM_DEVICE void step(const tile::QueryTile& t, int block, bool masked, float (&o)[outputs],
                          tile::OnlineSoftmax& softmax);
  TANDEM_DEVICE void add_values(int row, const u32 (&a)[4], float scale, float (&o)[outputs]);
  TANDEM_DEVICE void store(const tile::QueryTile& t, float (&o)[outputs], const tile::OnlineSoftmax& softmax);
  TANDEM_DEVICE void store_alone(const tile::QueryTile& t, const float (&o)[outputs],
                                 const float (&weight)[2], float value_scale);
  TANDEM_DEVICE void finish_part(const tile::QueryTile& t);
  TANDEM_DEVICE void merge_ending();
  struct PartList;
  TANDEM_DEVICE void await_flags(const PartList& parts, int count);
  TANDEM_DEVICE void merge_row(const tile::TileIndex& t, int row, const PartList& parts, int to);
  TANDEM_DEVICE void store_in_cluster(const tile::QueryTile& t, const float (&o)[outputs],
                                      const float (&weight)[2], float value_scale);
  TANDEM_DEVICE void exchange_sums(const tile::OnlineSoftmax& softmax);
  TANDEM_DEVICE float finish_row(const tile::QueryTile& t, const tile::TileRow& at, int row, tile::RowSum own,
                                 bool writes);
  template <int count>
  TANDEM_DEVICE void exchange_columns(int begin, const float (&o)[outputs], const float (&weight)[2],
                                      int rows);
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

  /// What all warps have of a row: the largest reference, and the sum relative to it.
  TANDEM_DEVICE tile::RowSum sum_of(int row) const {
    tile::RowSum all{{reference_of(row), 0.0F}};
#pragma unroll
    for (int w = 0; w < decode_warps; ++w) {
      const float worth =
          tile::OnlineSoftmax::rescaled(ptx::load_shared(&shared.exchange.reference[w][row]), all.reference);
      all.sum = ptx::fma(ptx::load_shared(&shared.exchange.sum[w][row]), worth, all.sum);
    }
    return all;
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

  /// The flag of a partial result, behind the sums of all of them: up when it has been written.
  [[nodiscard]] TANDEM_DEVICE u64* flag_of(int part) const {
    return reinterpret_cast<u64*>(p.part_sums + partial_sums(C.tiling, p.split_ctas)) + part;
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

}  // namespace tandem
