// The seesaw of `forward_wide`: two warpgroups that score every second block of keys of a tile each, and have
// half of the columns of O each. One's softmax runs under the other's products.
//
//     warpgroup 0 | softmax 0 | O += P0 V0 | O += P1 V1 | S2 | softmax 2 | ...        columns 0 on
//     warpgroup 1 | S1        | O += P0 V0, softmax 1 | O += P1 V1 | S3 | ...         the other half
//
// A warpgroup has its own P in registers. The other one's comes through shared memory, with what O is
// multiplied by first, and the maximum and the sum of each row so far. Both add the blocks in their order:
// the results are those of one warpgroup that scores, bit for bit. FlashMLA published a schedule of this
// kind.
#pragma once

#include "ops/latent/sm90/wide_parts.cuh"

namespace tandem {

/// The warp that walks over the tiles, and tells the two warpgroups, which have no registers for that.
template <LatentConfig C>
TANDEM_DEVICE void tell_tiles(const ForwardParams& p, WideShared<C>& shared, int lane) {
  ForwardTiles<C> tiles(p, shared.in.tiles);
  typename tile::Ring<2>::Position at;
  const WideThread warp{lane};
  tile::QueryTile t{};
  for (bool exists = true; exists;) {
    exists = tiles.template next<false>(t, warp.warp_leader());
    warp.hand_over(shared.exchange.tile_ring, at, [&] {
      if (lane == 0) ptx::store_shared(&shared.exchange.tiles[at.stage], WideTile{t, exists});
    });
  }
}

/// One of the two warpgroups.
template <LatentConfig C, int part>
struct Seesaw {
  static_assert(C.v_in_k, "K's rings tell when V is free");
  using Shared = WideShared<C>;
  using Columns = WideColumns<C>;
  static constexpr int scores = WideScores<C>::scores;
  static constexpr int outputs = Columns::outputs;
  static constexpr int products = Columns::products;
  static constexpr int other = 1 - part;
  using Scores = float[scores];
  using Weights = u32[scores / 2];
  using Outputs = float[outputs];

  Shared& shared;
  WideScores<C> scorer;  ///< has the place of the block that is scored next
  Columns columns;       ///< has the place of the block that is added next
  typename tile::Ring<1>::Position own_at, other_at;
  typename tile::Ring<2>::Position tile_at;

  TANDEM_DEVICE Seesaw(const ForwardParams& params, Shared& s, int thread)
      : shared(s), scorer(params, s, thread), columns(params, s, part, thread) {}

  TANDEM_DEVICE void run() {
    for (;;) {
      const WideTile& told = shared.exchange.tiles[tile_at.stage];
      shared.exchange.tile_ring.wait(tile_at);
      if (!ptx::load_shared(&told.exists)) return;
      compute(told.tile);
      columns.release(shared.exchange.tile_ring, tile_at);
    }
  }

  /// What the epilogue alone has to know of a tile is loaded when its blocks have been added.
  TANDEM_DEVICE void compute(const tile::QueryTile& told) {
    tile::QueryTile t;
    t.blocks = ptx::load_shared(&told.blocks);
    if (t.blocks.first >= t.blocks.end) return columns.store_unseeing(ptx::load_shared(&told));
    t.visible = ptx::load_shared(&told.visible);
    t.index.m = ptx::load_shared(&told.index.m);
    Outputs o;
    tile::set_zero(o);
    tile::OnlineSoftmax softmax;
    shared.in.q_ring[0].wait(scorer.q_at);
    scorer.k_at = columns.v_at;
    if constexpr (part == 0) {
      lead(t, o, softmax);
    } else {
      scorer.k_at.advance();
      follow(t, o, softmax);
    }
    scorer.release(shared.in.q_ring[0], scorer.q_at);
    columns.store(ptx::load_shared(&told), o, softmax);
  }

  /// Warpgroup 0: blocks 0, 2, 4, ... are its own. Their scores are issued behind the products of the other's
  /// block before, whose places in K's tiles are free by then.
  TANDEM_DEVICE void lead(const tile::QueryTile& t, Outputs& o, tile::OnlineSoftmax& softmax) {
    const tile::BlockRange inner = scorer.inner_blocks(t);
    for (int block = t.blocks.end - 1; block >= t.blocks.first; block -= 2) {
      Scores s;
      Weights weights;
      float rescale[2];
      issue_scores(s);
      wait_for_scores<0>(s);
      scorer.weigh(t, block, inner.needs_mask(block), softmax, s, rescale, weights);
      add_own(t, block, o, softmax, rescale, weights);
      if (block == t.blocks.first) return;
      issue_other(t, block - 1, o, softmax);
      end_other(o);
    }
  }

  /// Warpgroup 1: blocks 1, 3, 5, ... Their softmax runs under products of the other's block before.
  TANDEM_DEVICE void follow(const tile::QueryTile& t, Outputs& o, tile::OnlineSoftmax& softmax) {
    const tile::BlockRange inner = scorer.inner_blocks(t);
    int block = t.blocks.end - 2;
    for (; block >= t.blocks.first; block -= 2) {
      Scores s;
      Weights weights;
      float rescale[2];
      issue_scores(s);
      issue_other(t, block + 1, o, softmax);
      wait_for_scores<products>(s);
      scorer.weigh(t, block, inner.needs_mask(block), softmax, s, rescale, weights);
      // Without a store between them ptxas puts the exponentials behind the wait for products. The other
      // warpgroup has read the sums that lie there: it has scored a block since.
      store_sums(softmax);
      end_other(o);
      add_own(t, block, o, softmax, rescale, weights);
    }
    if (block + 1 == t.blocks.first) {
      issue_other(t, block + 1, o, softmax);
      end_other(o);
    }
  }

  TANDEM_DEVICE void issue_scores(Scores& s) {
    scorer.issue_group(s);
    ptx::wgmma_commit();
  }
  /// `pending`: products that were issued behind the scores. What is not V is free then: each of the other
  /// groups is so when the warpgroup that has its columns has multiplied them.
  template <int pending>
  TANDEM_DEVICE void wait_for_scores(Scores& s) {
    ptx::wgmma_wait<pending>();
    ptx::pin_registers(s);
    if constexpr (KeyGroups<C>::rest > 0) {
      if (scorer.warp_leader()) shared.in.k_group_ring(0).release(scorer.k_at);
    }
    scorer.k_at.advance();
    scorer.k_at.advance();
  }

  /// What hands P of a warpgroup's blocks to the other one.
  template <int of>
  TANDEM_DEVICE tile::Ring<1>& ring() {
    return of == 0 ? shared.exchange.block_ring : shared.exchange.second_ring;
  }
  /// Stores what the same thread of the other warpgroup goes on from.
  TANDEM_DEVICE void store_sums(const tile::OnlineSoftmax& softmax) {
    ptx::store_shared(&shared.exchange.sums[columns.thread], {softmax.sum[0], softmax.sum[1]});
  }

  /// Hands P of its own block to the other warpgroup, and adds it.
  TANDEM_DEVICE void add_own(const tile::QueryTile& t, int block, Outputs& o,
                             const tile::OnlineSoftmax& softmax, const float (&rescale)[2],
                             const Weights& weights) {
    // P goes where the other's lay, which all warps of this one have to have read; and they have their
    // scores.
    columns.meet();
    scorer.hand_over(ring<part>(), own_at, [&] {
      if constexpr (part == 0) store_sums(softmax);
      scorer.store(weights, rescale);
      scorer.each_row(
          [&](int row, int h) { ptx::store_shared(&shared.exchange.references[row], softmax.reference[h]); });
    });
    tile::scale_moved_rows(o, rescale);
    if (const int valid = valid_keys(t, block); C.mask.varlen && valid < C.tiling.block_n) {
      columns.clear_tail(max(valid, 0));
    }
    columns.issue(o, weights);
    end_products(o);
  }

  /// Issues the products of the other's block, and goes on from its softmax.
  TANDEM_DEVICE void issue_other(const tile::QueryTile& t, int block, Outputs& o,
                                 tile::OnlineSoftmax& softmax) {
    ring<other>().wait(other_at);
    columns.wait_for_values();
    float rescale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = columns.position.row(h);
      rescale[h] = ptx::load_shared(&shared.exchange.rescale[row]);
      softmax.reference[h] = ptx::load_shared(&shared.exchange.references[row]);
    }
    const ptx::Float2 sums = ptx::load_shared(&shared.exchange.sums[columns.thread]);
    softmax.sum[0] = sums.x;
    softmax.sum[1] = sums.y;
    tile::scale_moved_rows(o, rescale);
    if (const int valid = valid_keys(t, block); C.mask.varlen && valid < C.tiling.block_n) {
      columns.clear_tail(max(valid, 0));
    }
    columns.issue(o);
  }
  TANDEM_DEVICE void end_other(Outputs& o) {
    end_products(o);
    columns.release(ring<other>(), other_at);
  }
  TANDEM_DEVICE void end_products(Outputs& o) {
    columns.release_first_products();
    ptx::wgmma_wait<0>();
    ptx::pin_registers(o);
    columns.release(columns.values_ring(products - 1), columns.v_at);
  }

  /// Keys that exist from the block on.
  static TANDEM_DEVICE int valid_keys(const tile::QueryTile& t, int block) {
    return t.visible.seqlen_k - block * C.tiling.block_n;
  }
};

/// All warps of a CTA: two warpgroups that compute, and of a third one warp that loads and one that walks.
template <LatentConfig C>
TANDEM_DEVICE void run_seesaw(const ForwardKernelParams<C>& p, WideShared<C>& shared, int warp, int thread) {
  constexpr int producer = 4 * latent_slices;
  if (warp >= producer) {
    ptx::release_registers<C.registers().producer>();
    if (warp == producer) ForwardLoader<C>(p, shared.in).run();
    if (warp == producer + 1) tell_tiles<C>(p, shared, thread % warp_size);
    return;
  }
  ptx::claim_registers<C.registers().consumer>();
  if (warp < 4) {
    Seesaw<C, 0>(p, shared, thread).run();
  } else {
    Seesaw<C, 1>(p, shared, thread).run();
  }
}

}  // namespace tandem
