// What the warpgroups of `forward_wide` are made of, whichever schedule they have: what they tell each other,
// the scores of a block of keys, and a warpgroup's columns of O.
#pragma once

#include "ops/forward/sm90/forward_producer.cuh"
#include "ops/latent/config.hpp"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "tile/logits.cuh"
#include "tile/mask.cuh"
#include "tile/merged_output.cuh"
#include "tile/pingpong.cuh"
#include "tile/softmax.cuh"

namespace tandem {

// ---- Shared storage ----

/// What a warpgroup, or a warp, that walks over the tiles tells the others of one.
struct WideTile {
  tile::QueryTile tile;
  bool exists;
};

template <LatentConfig C>
struct WideShared {
  using ScoreTile = tile::SharedTile<64, C.tiling.block_n>;

  ForwardShared<C> in;
  /// Sums of exponentials: a tile's rows, or with a seesaw each thread's columns of two rows.
  using Sums = typename Select<C.schedule.seesaw, ptx::Float2[warpgroup_size], float[64]>::type;
  struct alignas(1024) Exchange {
    ScoreTile probabilities;  ///< those of a block
    float rescale[64];        ///< what O is multiplied by before the block is added
    float references[64];     ///< those of a tile's rows at its end, with a seesaw behind the block
    Sums sums;
    WideTile tiles[2];  ///< the one that is computed, and the next
    tile::Ring<1> block_ring;
    /// Hands over sums, or with a seesaw the blocks of warpgroup 1: then block_ring has those of warpgroup 0.
    tile::Ring<1> second_ring;
    tile::Ring<2> tile_ring;
  } exchange;

  /// One thread calls, before the others use any barrier.
  TANDEM_DEVICE void init() {
    constexpr u32 readers = C.schedule.seesaw ? 4 : 4 * latent_slices;
    exchange.block_ring.init(readers, 4);
    exchange.second_ring.init(readers, 4);
    exchange.tile_ring.init(4 * latent_slices, C.walking_warps());
    in.init();
  }
};

/// A thread of a warpgroup.
struct WideThread {
  const int thread;
  const tile::FragmentPosition position{thread};

  TANDEM_DEVICE bool warp_leader() const { return thread % warp_size == 0; }
  /// Calls f(the row, its number among the thread's two) by one lane of the four that have it.
  template <typename F>
  TANDEM_DEVICE void each_row(const F& f) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (thread % 4 == 0) f(position.row(h), h);
    }
  }
  /// What `write` stores is fenced for the tensor cores, which read it by another way, before the warp says
  /// that it is there.
  template <typename Ring, typename Write>
  TANDEM_DEVICE void hand_over(Ring& ring, typename Ring::Position& at, const Write& write) const {
    ring.wait_free(at);
    write();
    ptx::fence_async_shared();
    ptx::sync_warp();
    if (warp_leader()) ring.hand_over(at);
    at.advance();
  }
  /// All lanes have read.
  template <typename Ring>
  TANDEM_DEVICE void release(Ring& ring, typename Ring::Position& at) const {
    ptx::sync_warp();
    if (warp_leader()) ring.release(at);
    at.advance();
  }
};

// ---- Scores ----

/// Scores of blocks of keys, and their exponentials.
template <LatentConfig C>
struct WideScores : WideThread {
  using Shared = WideShared<C>;
  using Groups = KeyGroups<C>;
  static constexpr int scores = C.tiling.block_n / 2;

  const ForwardParams& p;
  Shared& shared;
  const float scale_log2;
  typename tile::Ring<C.stages>::Position k_at;
  typename tile::Ring<C.q_stages>::Position q_at;

  TANDEM_DEVICE WideScores(const ForwardParams& params, Shared& s, int thread_)
      : WideThread{thread_}, p(params), shared(s), scale_log2(tile::scale_log2_of<C.transform>(params)) {}

  /// Issues S = Q K^T, from group `g` of K's strips on, in one order wherever V is, for the same bits.
  template <int g = 0>
  TANDEM_DEVICE void issue_group(float (&s)[scores]) {
    using QTile = typename ForwardShared<C>::QTile;
    using KTile = typename ForwardShared<C>::KTile;
    constexpr int steps_of_strip = Groups::strip / 16;
    constexpr int first = Groups::count > 1 ? Groups::first_strip(g) * steps_of_strip : 0;
    constexpr int count = Groups::count > 1 ? Groups::strips(g) * steps_of_strip : C.tiling.head_dim_qk / 16;
    if constexpr (C.v_in_k) shared.in.k_group_ring(g).wait(k_at);
    if constexpr (C.v_in_k || g == 0) ptx::wgmma_fence();
    const ptx::MatrixDescriptor q = shared.in.q[0][q_at.stage].k_major();
    const ptx::MatrixDescriptor k = shared.in.k[k_at.stage].k_major();
#pragma unroll
    for (int step = first; step < first + count; ++step) {
      ptx::wgmma_shared<C.tiling.block_n, C.tiling.element, false>(
          s, q + QTile::k_major_offset(step), k + KTile::k_major_offset(step), g != 0 || step != first);
    }
    if constexpr (g + 1 < Groups::count) issue_group<g + 1>(s);
  }

  /// The exponentials of a block's scores in 16 bits; O and earlier sums are multiplied by `rescale` first.
  TANDEM_DEVICE void weigh(const tile::QueryTile& t, int block, bool masked, tile::OnlineSoftmax& softmax,
                           float (&s)[scores], float (&rescale)[2], u32 (&packed)[scores / 2]) {
    tile::transform_scores<C.transform>(s, p.score);
    if (masked) {
      tile::apply_mask(s, t.visible, tile::first_query<C.tiling>(p, t.index.m, 0), block * C.tiling.block_n,
                       tile::query_position<C.tiling>(p, position));
    }
    softmax.add_block<true>(s, rescale, scale_log2);
    tile::convert<C.tiling.element>(packed, s);
  }

  TANDEM_DEVICE void store(const u32 (&packed)[scores / 2]) {
    const int lane = thread % warp_size;
    const int row = thread / warp_size * 16 + lane % 16;
    const int col = lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < C.tiling.block_n / 16; ++j) {
      ptx::stmatrix_x4(shared.exchange.probabilities.address(row, col + 16 * j), packed[4 * j],
                       packed[4 * j + 1], packed[4 * j + 2], packed[4 * j + 3]);
    }
  }
  /// Stores P, and what O is multiplied by first.
  TANDEM_DEVICE void store(const u32 (&packed)[scores / 2], const float (&rescale)[2]) {
    store(packed);
    each_row([&](int row, int h) { ptx::store_shared(&shared.exchange.rescale[row], rescale[h]); });
  }

  /// The key blocks of a tile that need no mask.
  TANDEM_DEVICE tile::BlockRange inner_blocks(const tile::QueryTile& t) const {
    const int first = tile::first_query<C.tiling>(p, t.index.m, 0);
    return tile::BlockRange::of<C.tiling.block_n>(t.visible, first,
                                                  first + tile::queries_of_unit<C.tiling>(p));
  }
};

// ---- Output ----

/// Some of the columns of O, which a warpgroup has.
template <LatentConfig C>
struct WideColumns : WideThread {
  using Shared = WideShared<C>;
  /// What V is in: a tile of K, whose first columns it is, or one of its own.
  using Values =
      typename Select<C.v_in_k, typename ForwardShared<C>::KTile, typename ForwardShared<C>::VTile>::type;
  static constexpr int columns = C.tiling.head_dim_v / latent_slices;
  static constexpr int outputs = columns / 2;
  static constexpr int width = wide_product_columns(C);  ///< columns of one product
  static constexpr int products = columns / width;

  const ForwardParams& p;
  Shared& shared;
  const int part;
  typename tile::Ring<C.stages>::Position v_at;
  tile::Output<C.tiling, C.schedule.invariant, columns> output;

  TANDEM_DEVICE WideColumns(const ForwardParams& params, Shared& s, int part_, int thread_)
      : WideThread{thread_},
        p(params),
        shared(s),
        part(part_),
        output{{part_ * columns}, params, 0, thread_} {}

  TANDEM_DEVICE Values& values() {
    if constexpr (C.v_in_k) {
      return shared.in.k[v_at.stage];
    } else {
      return shared.in.v[v_at.stage];
    }
  }
  /// The ring of what the `product`-th product with P reads of V.
  TANDEM_DEVICE auto& values_ring(int product) {
    if constexpr (C.v_in_k) {
      return shared.in.k_group_ring(KeyGroups<C>::of(part, product));
    } else {
      return shared.in.v_ring;
    }
  }
  TANDEM_DEVICE void wait_for_values() {
#pragma unroll
    for (int i = 0; i < (C.v_in_k ? products : 1); ++i) values_ring(i).wait(v_at);
  }

  /// Rows of V past the sequence's end, of which a block has `valid`, may hold anything, and 0 * NaN is NaN.
  /// Without varlen TMA has filled them with zeros. Where V is in K, the scores of the block are known by
  /// now.
  TANDEM_DEVICE void clear_tail(int valid) {
    values().zero_rows(valid, C.tiling.block_n, part * columns, columns, thread, warpgroup_size);
    ptx::fence_async_shared();
    meet();
  }
  /// The threads of the warpgroup.
  TANDEM_DEVICE void meet() {
    ptx::named_barrier_sync(tile::barrier_consumers + part, warpgroup_size);
  }

  /// Issues O += P V, one group of products behind the other; `product` issues a step of one.
  template <typename Product>
  TANDEM_DEVICE void issue_products(float (&o)[outputs], const Product& product) {
    const ptx::MatrixDescriptor v =
        values().mn_major() + static_cast<u32>(part * columns / Values::strip_cols) * Values::strip_bytes;
    constexpr u32 wide_bytes = width / Values::strip_cols * Values::strip_bytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < products; ++i) {
#pragma unroll
      for (int step = 0; step < C.tiling.block_n / 16; ++step) {
        product(reinterpret_cast<float(&)[width / 2]>(o[i * (width / 2)]), step,
                v + (static_cast<u32>(i) * wide_bytes + Values::mn_major_offset(step)));
      }
      ptx::wgmma_commit();
    }
  }
  /// P is in shared memory.
  TANDEM_DEVICE void issue(float (&o)[outputs]) {
    const ptx::MatrixDescriptor probabilities = shared.exchange.probabilities.k_major();
    issue_products(o, [&](float(&d)[width / 2], int step, ptx::MatrixDescriptor v) {
      ptx::wgmma_shared<width, C.tiling.element, true>(
          d, probabilities + Shared::ScoreTile::k_major_offset(step), v, true);
    });
  }
  /// P is in registers.
  TANDEM_DEVICE void issue(float (&o)[outputs], const u32 (&packed)[C.tiling.block_n / 4]) {
    issue_products(o, [&](float(&d)[width / 2], int step, ptx::MatrixDescriptor v) {
      ptx::wgmma_registers<width, C.tiling.element, true>(d, packed + 4 * step, v, true);
    });
  }
  /// Gives back what all products but the last have read, as each ends.
  template <int i = 0>
  TANDEM_DEVICE void release_first_products() {
    if constexpr (i + 1 < products) {
      ptx::wgmma_wait<products - 1 - i>();
      ptx::sync_warp();
      if (warp_leader()) values_ring(i).release(v_at);
      release_first_products<i + 1>();
    }
  }

  /// The reference of a tile's rows at its end, and `sum_of(row)` of them.
  template <typename SumOf>
  TANDEM_DEVICE void set_rows(tile::OnlineSoftmax& softmax, const SumOf& sum_of) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      softmax.reference[h] = ptx::load_shared(&shared.exchange.references[position.row(h)]);
      const float sum = sum_of(position.row(h));
      softmax.sum[h] = thread % 4 == 0 ? sum : 0.0F;  // a quad has it once
    }
  }
  TANDEM_DEVICE void store(const tile::QueryTile& t, float (&o)[outputs], tile::OnlineSoftmax& softmax) {
    tile::find_infinite<C.mask>(softmax, output, t.index);
    output.template store<C.schedule.split>(t.index, o, softmax, t.part, t.split);
  }
  /// A tile without keys: the first of the warpgroups writes it.
  TANDEM_DEVICE void store_unseeing(const tile::QueryTile& t) const {
    if (part != 0) return;
    tile::Output<C.tiling, C.schedule.invariant>{{}, p, 0, thread}.template store_unseeing<C.schedule.split>(
        t.index, t.part);
  }
};

}  // namespace tandem
