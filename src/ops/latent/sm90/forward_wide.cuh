// The forward kernel of heads wider than 256 columns, whose O no warpgroup has registers for: two have half
// of its columns each. A third walks over the tiles of 64 rows, scores a block of keys after the other and
// hands P, through shared memory, to the two; products of the next scores run beside those of P V. Or the two
// score every second block each (seesaw.cuh).
//
// Where V is the first columns of K (multi-head latent attention), one tile serves both products.
// docs/kernels/wide-heads.md has the arithmetic.
#pragma once

#include "ops/latent/sm90/seesaw.cuh"
#include "ops/latent/sm90/wide_parts.cuh"

namespace tandem {

// ---- Scores ----

/// The warpgroup that scores.
template <LatentConfig C>
struct WideScorer : WideScores<C> {
  using Scores = WideScores<C>;
  using Scores::hand_over, Scores::warp_leader, Scores::shared, Scores::thread, Scores::k_at, Scores::q_at;
  using Scores::scores;

  typename tile::Ring<1>::Position block_at, sum_at;
  typename tile::Ring<2>::Position tile_at;
  ForwardTiles<C> tiles;

  TANDEM_DEVICE WideScorer(const ForwardParams& params, WideShared<C>& s, int thread_)
      : Scores(params, s, thread_), tiles(params, s.in.tiles) {}

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
    const tile::BlockRange inner = Scores::inner_blocks(t);
    tile::OnlineSoftmax softmax;
    shared.in.q_ring[0].wait(q_at);
    for (int block = t.blocks.end - 1; block >= t.blocks.first; --block) {
      step(t, block, inner.needs_mask(block), softmax);
    }
    if (warp_leader()) shared.in.q_ring[0].release(q_at);
    q_at.advance();
    hand_over(shared.exchange.second_ring, sum_at, [&] {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = tile::sum_of_quad(softmax.sum[h]);
        if (thread % 4 != 0) continue;
        ptx::store_shared(&shared.exchange.references[Scores::position.row(h)], softmax.reference[h]);
        ptx::store_shared(&shared.exchange.sums[Scores::position.row(h)], sum);
      }
    });
  }

  /// Scores of one block, and their exponentials.
  TANDEM_DEVICE void step(const tile::QueryTile& t, int block, bool masked, tile::OnlineSoftmax& softmax) {
    float s[scores];
    if constexpr (!C.v_in_k) shared.in.k_ring.wait(k_at);
    Scores::issue_group(s);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin_registers(s);
    if (warp_leader()) {
#pragma unroll
      for (int g = 0; g < loaded_key_groups(C); ++g) shared.in.k_group_ring(g).release(k_at);
    }
    k_at.advance();
    float rescale[2];
    u32 packed[scores / 2];
    Scores::weigh(t, block, masked, softmax, s, rescale, packed);
    hand_over(shared.exchange.block_ring, block_at, [&] { Scores::store(packed, rescale); });
  }
};

// ---- Output ----

/// One of the warpgroups that have O, each some of its columns.
template <LatentConfig C>
struct WideOutput : WideColumns<C> {
  using Columns = WideColumns<C>;
  using Columns::outputs, Columns::products;
  using Columns::release, Columns::shared, Columns::v_at, Columns::position, Columns::values_ring;

  typename tile::Ring<1>::Position block_at, sum_at;
  typename tile::Ring<2>::Position tile_at;

  using Columns::Columns;

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
      tile::OnlineSoftmax softmax;
      shared.exchange.second_ring.wait(sum_at);
      Columns::set_rows(softmax, [&](int row) { return ptx::load_shared(&shared.exchange.sums[row]); });
      release(shared.exchange.second_ring, sum_at);
      Columns::store(t, o, softmax);
    } else {
      Columns::store_unseeing(t);
    }
    release(shared.exchange.tile_ring, tile_at);
    return true;
  }

  /// O = rescale O + P V of a block of which `valid` keys exist.
  TANDEM_DEVICE void step(int valid, float (&o)[outputs]) {
    shared.exchange.block_ring.wait(block_at);
    Columns::wait_for_values();
    float rescale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) rescale[h] = ptx::load_shared(&shared.exchange.rescale[position.row(h)]);
    tile::scale_moved_rows(o, rescale);
    if (C.mask.varlen && valid < C.tiling.block_n) Columns::clear_tail(max(valid, 0));
    Columns::issue(o);
    if constexpr (C.v_in_k) Columns::release_first_products();
    ptx::wgmma_wait<0>();
    ptx::pin_registers(o);
    release(shared.exchange.block_ring, block_at);
    release(values_ring(products - 1), v_at);
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
  if constexpr (C.schedule.seesaw) {
    run_seesaw<C>(p, shared, warp, thread);
  } else if (warp < 4) {
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
