// The forward kernel of heads wider than 256 columns, whose O no warpgroup has registers for. Three
// warpgroups share a tile of 64 rows: one walks over the tiles, scores a block of keys after the other and
// hands P, through shared memory, to two that have half of the columns of O each. Products of the next scores
// run beside those of P V.
//
// Where V is the first columns of K (multi-head latent attention), one tile serves both products.
// docs/kernels/wide-heads.md has the arithmetic.
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

/// What the warpgroup that scores tells the others of a tile.
struct WideTile {
  tile::QueryTile tile;
  bool exists;
};

template <LatentConfig C>
struct WideShared {
  using ScoreTile = tile::SharedTile<64, C.tiling.block_n>;

  ForwardShared<C> in;
  struct alignas(1024) Exchange {
    ScoreTile probabilities;  ///< those of a block
    float rescale[64];        ///< what O is multiplied by before the block is added
    float references[64];     ///< those of a tile's rows at its end, and the sums of their exponentials
    float sums[64];
    WideTile tiles[2];  ///< the one that is computed, and the next
    tile::Ring<1> block_ring;
    tile::Ring<1> sum_ring;
    tile::Ring<2> tile_ring;
  } exchange;

  /// One thread calls, before the others use any barrier.
  TANDEM_DEVICE void init() {
    exchange.block_ring.init(4 * latent_slices, 4);
    exchange.sum_ring.init(4 * latent_slices, 4);
    exchange.tile_ring.init(4 * latent_slices, 4);
    in.init();
  }
};

// ---- Scores ----

/// The warpgroup that scores.
template <LatentConfig C>
struct WideScorer {
  using Shared = WideShared<C>;
  using Groups = KeyGroups<C>;
  static constexpr int scores = C.tiling.block_n / 2;

  const ForwardParams& p;
  Shared& shared;
  const int thread;  ///< in the warpgroup
  const tile::FragmentPosition position;
  const float scale_log2;
  typename tile::Ring<C.stages>::Position k_at;
  typename tile::Ring<C.q_stages>::Position q_at;
  typename tile::Ring<1>::Position block_at, sum_at;
  typename tile::Ring<2>::Position tile_at;
  ForwardTiles<C> tiles;

  TANDEM_DEVICE WideScorer(const ForwardParams& params, Shared& s, int thread_)
      : p(params),
        shared(s),
        thread(thread_),
        position(thread_),
        scale_log2(tile::scale_log2_of<C.transform>(params)),
        tiles(params, s.in.tiles) {}

  TANDEM_DEVICE bool warp_leader() const { return thread % warp_size == 0; }
  TANDEM_DEVICE void run() {
    tile::QueryTile t;
    bool more = true;
    while (more) {
      more = tiles.template next<false>(t, warp_leader());
      hand_over(shared.exchange.tile_ring, tile_at, [&] {
        if (thread == 0) ptx::store_shared(&shared.exchange.tiles[tile_at.stage], WideTile{t, more});
      });
      if (more && t.blocks.first < t.blocks.end) compute(t);
    }
  }

  TANDEM_DEVICE void compute(const tile::QueryTile& t) {
    const int first = tile::first_query<C.tiling>(p, t.index.m, 0);
    const tile::BlockRange inner =
        tile::BlockRange::of<C.tiling.block_n>(t.visible, first, first + tile::queries_of_unit<C.tiling>(p));
    tile::OnlineSoftmax softmax;
    shared.in.q_ring[0].wait(q_at);
    for (int block = t.blocks.end - 1; block >= t.blocks.first; --block) {
      step(t, block, inner.needs_mask(block), softmax);
    }
    if (warp_leader()) shared.in.q_ring[0].release(q_at);
    q_at.advance();
    hand_over(shared.exchange.sum_ring, sum_at, [&] {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = tile::sum_of_quad(softmax.sum[h]);
        if (thread % 4 != 0) continue;
        ptx::store_shared(&shared.exchange.references[position.row(h)], softmax.reference[h]);
        ptx::store_shared(&shared.exchange.sums[position.row(h)], sum);
      }
    });
  }

  /// Scores of one block, and their exponentials.
  TANDEM_DEVICE void step(const tile::QueryTile& t, int block, bool masked, tile::OnlineSoftmax& softmax) {
    float s[scores];
    if constexpr (!C.v_in_k) shared.in.k_ring.wait(k_at);
    issue_group(s);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin_registers(s);
    if (warp_leader()) {
#pragma unroll
      for (int g = 0; g < loaded_key_groups(C); ++g) shared.in.k_group_ring(g).release(k_at);
    }
    k_at.advance();
    tile::transform_scores<C.transform>(s, p.score);
    if (masked) {
      tile::apply_mask(s, t.visible, tile::first_query<C.tiling>(p, t.index.m, 0), block * C.tiling.block_n,
                       tile::query_position<C.tiling>(p, position));
    }
    float rescale[2];
    softmax.add_block<true>(s, rescale, scale_log2);
    u32 packed[scores / 2];
    tile::convert<C.tiling.element>(packed, s);
    hand_over(shared.exchange.block_ring, block_at, [&] {
      store(packed);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (thread % 4 == 0) ptx::store_shared(&shared.exchange.rescale[position.row(h)], rescale[h]);
      }
    });
  }

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

  /// What `write` stores is fenced for the tensor cores, which read it by another way, before the warp says
  /// that it is there.
  template <typename Ring, typename Write>
  TANDEM_DEVICE void hand_over(Ring& ring, typename Ring::Position& at, const Write& write) {
    ring.wait_free(at);
    write();
    ptx::fence_async_shared();
    ptx::sync_warp();
    if (warp_leader()) ring.hand_over(at);
    at.advance();
  }
};

// ---- Output ----

/// One of the warpgroups that have O, each some of its columns.
template <LatentConfig C>
struct WideOutput {
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
  const int thread;  ///< in the warpgroup
  const tile::FragmentPosition position;
  typename tile::Ring<C.stages>::Position v_at;
  typename tile::Ring<1>::Position block_at, sum_at;
  typename tile::Ring<2>::Position tile_at;
  tile::Output<C.tiling, C.schedule.invariant, columns> output;

  TANDEM_DEVICE WideOutput(const ForwardParams& params, Shared& s, int part_, int thread_)
      : p(params),
        shared(s),
        part(part_),
        thread(thread_),
        position(thread_),
        output{{part_ * columns}, params, 0, thread_} {}

  TANDEM_DEVICE bool warp_leader() const { return thread % warp_size == 0; }
  /// All lanes have read.
  template <typename Ring>
  TANDEM_DEVICE void release(Ring& ring, typename Ring::Position& at) {
    ptx::sync_warp();
    if (warp_leader()) ring.release(at);
    at.advance();
  }
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

  /// One tile; false if there is none. What the epilogue has to know of it stays in shared memory until then:
  /// there are no registers for it beside O.
  TANDEM_DEVICE bool compute() {
    const WideTile& told = shared.exchange.tiles[tile_at.stage];
    shared.exchange.tile_ring.wait(tile_at);
    if (!ptx::load_shared(&told.exists)) return false;
    const tile::BlockRange blocks = ptx::load_shared(&told.tile.blocks);
    const int seqlen_k = ptx::load_shared(&told.tile.index.seqlen_k);
    float o[outputs];
    tile::set_zero(o);
    for (int block = blocks.end - 1; block >= blocks.first; --block) {
      step(seqlen_k - block * C.tiling.block_n, o);
    }
    const tile::QueryTile t = ptx::load_shared(&told.tile);
    if (t.blocks.first < t.blocks.end) {
      store(t, o);
    } else if (part == 0) {
      tile::Output<C.tiling, C.schedule.invariant>{{}, p, 0, thread}
          .template store_unseeing<C.schedule.split>(t.index, t.part);
    }
    release(shared.exchange.tile_ring, tile_at);
    return true;
  }
  TANDEM_DEVICE void store(const tile::QueryTile& t, float (&o)[outputs]) {
    tile::OnlineSoftmax softmax;
    shared.exchange.sum_ring.wait(sum_at);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      softmax.reference[h] = ptx::load_shared(&shared.exchange.references[position.row(h)]);
      const float sum = ptx::load_shared(&shared.exchange.sums[position.row(h)]);
      softmax.sum[h] = thread % 4 == 0 ? sum : 0.0F;  // a quad has it once
    }
    release(shared.exchange.sum_ring, sum_at);
    tile::find_infinite<C.mask>(softmax, output, t.index);
    output.template store<C.schedule.split>(t.index, o, softmax, t.part, t.split);
  }

  /// O = rescale O + P V of a block of which `valid` keys exist.
  TANDEM_DEVICE void step(int valid, float (&o)[outputs]) {
    shared.exchange.block_ring.wait(block_at);
#pragma unroll
    for (int i = 0; i < (C.v_in_k ? products : 1); ++i) values_ring(i).wait(v_at);
    float rescale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) rescale[h] = ptx::load_shared(&shared.exchange.rescale[position.row(h)]);
    tile::scale_moved_rows(o, rescale);
    if (C.mask.varlen && valid < C.tiling.block_n) clear_tail(max(valid, 0));
    issue(o);
    if constexpr (C.v_in_k) release_first_products();
    ptx::wgmma_wait<0>();
    ptx::pin_registers(o);
    release(shared.exchange.block_ring, block_at);
    release(values_ring(products - 1), v_at);
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

  /// Rows of V past the sequence's end may hold anything, and 0 * NaN is NaN. Without varlen TMA has filled
  /// them with zeros. Where V is in K, the scores of the block are known by now.
  TANDEM_DEVICE void clear_tail(int valid) {
    values().zero_rows(valid, C.tiling.block_n, part * columns, columns, thread, warpgroup_size);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(tile::barrier_consumers + part, warpgroup_size);
  }

  /// Issues O += P V, one group of products behind the other.
  TANDEM_DEVICE void issue(float (&o)[outputs]) {
    const ptx::MatrixDescriptor probabilities = shared.exchange.probabilities.k_major();
    const ptx::MatrixDescriptor v =
        values().mn_major() + static_cast<u32>(part * columns / Values::strip_cols) * Values::strip_bytes;
    constexpr u32 wide_bytes = width / Values::strip_cols * Values::strip_bytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < products; ++i) {
#pragma unroll
      for (int step = 0; step < C.tiling.block_n / 16; ++step) {
        ptx::wgmma_shared<width, C.tiling.element, true>(
            reinterpret_cast<float(&)[width / 2]>(o[i * (width / 2)]),
            probabilities + Shared::ScoreTile::k_major_offset(step),
            v + (static_cast<u32>(i) * wide_bytes + Values::mn_major_offset(step)), true);
      }
      ptx::wgmma_commit();
    }
  }
};

// ---- Entry ----

template <LatentConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), 1)
    forward_wide(const __grid_constant__ ForwardKernelParams<C> p) {
  static_assert(sizeof(WideShared<C>) == forward_shared_bytes(C));
  auto& shared = *reinterpret_cast<WideShared<C>*>(ptx::dynamic_shared());
  const int warp = ptx::warp_index();
  const int thread = static_cast<int>(ptx::thread_index()) % warpgroup_size;
  begin_forward<C>(p, shared, shared.in);
  if (warp < 4) {
    ptx::release_registers<C.registers().scorer>();
    WideScorer<C>(p, shared, thread).run();
  } else if (warp < 4 * (1 + latent_slices)) {
    ptx::claim_registers<C.registers().consumer>();
    WideOutput<C> output(p, shared, warp / 4 - 1, thread);
    while (output.compute()) {
    }
  } else {
    ptx::release_registers<C.registers().producer>();
    if (warp == 4 * (1 + latent_slices)) ForwardLoader<C>(p, shared.in).run();
  }
  // The other CTA may still copy to this one, or arrive at its barriers.
  if constexpr (C.pairs) {
    ptx::sync_warp();
    ptx::sync_cluster();
  }
}

}  // namespace tandem
