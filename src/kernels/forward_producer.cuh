// The forward pass's shared memory, its tiles, and the producer warp that fills the one for the other.
#pragma once

#include "kernels/config.hpp"
#include "kernels/ptx/barrier.cuh"
#include "kernels/tile/mask.cuh"
#include "kernels/tile/pipeline.cuh"
#include "kernels/tile/scheduler.cuh"
#include "kernels/tile/shared_tile.cuh"

namespace tandem {

// ---- Shared storage ----

template <ForwardConfig C>
struct ForwardShared {
  using QTile = tile::SharedTile<64, C.head_dim_qk>;
  using KTile = tile::SharedTile<C.block_n, C.head_dim_qk>;
  using VTile = tile::SharedTile<C.block_n, C.head_dim_v>;

  QTile q[C.consumers()][C.q_stages];
  KTile k[C.stages];
  VTile v[C.stages];
  tile::Ring<C.stages> k_ring;
  tile::Ring<C.stages> v_ring;
  tile::Ring<C.q_stages> q_ring[C.consumers()];
  tile::DrawnTiles::Shared tiles;
};

/// Named barriers: 1 to 3 hand the turn to a consumer warpgroup; 4 joins all consumers.
constexpr int barrier_turn = 1;
constexpr int barrier_consumers = 4;

/// The consumer warpgroups' turns on the tensor cores (ping-pong).
template <bool pingpong>
TANDEM_DEVICE void take_turn_of(int warpgroup) {
  if constexpr (pingpong) ptx::named_barrier_sync(barrier_turn + warpgroup, 2 * warpgroup_size);
}
template <bool pingpong, int consumers>
TANDEM_DEVICE void pass_turn_of(int warpgroup) {
  if constexpr (pingpong) {
    const int next = warpgroup + 1 == consumers ? 0 : warpgroup + 1;
    ptx::named_barrier_arrive(barrier_turn + next, 2 * warpgroup_size);
  }
}

/// A tile with what follows from its place: which keys its queries see, and the key blocks it walks. Every
/// warpgroup walks all of them, so that turns and buffers stay in step.
template <ForwardConfig C>
struct ForwardTile {
  tile::TileIndex index;
  tile::Visibility visible;
  tile::BlockRange blocks;
};

template <bool b>
struct Truth {
  static constexpr bool value = b;
};

template <bool condition, typename Then, typename Else>
struct Select {
  using type = Then;
};
template <typename Then, typename Else>
struct Select<false, Then, Else> {
  using type = Else;
};

/// The tiles of this block, one after another; producer and consumers walk the same ones.
template <ForwardConfig C>
struct ForwardTiles {
  const ForwardParams& p;
  tile::DealtTiles<C.causal && !C.ragged> dealt;
  tile::DrawnTiles drawn;
  typename Select<C.ragged, tile::RaggedTiles<C.block_m>, tile::DenseTiles<C.causal>>::type tiles;

  TANDEM_DEVICE ForwardTiles(const ForwardParams& params, tile::DrawnTiles::Shared& shared)
      : p(params), drawn(shared, params.tile_counter) {}

  /// All lanes of a warp call; `leader` is true on one of them.
  template <bool producer>
  TANDEM_DEVICE bool next(ForwardTile<C>& t, bool leader) {
    const int number = !C.dynamic ? dealt.next() : producer ? drawn.draw(leader) : drawn.receive(leader);
    // Uniform already; the shuffle lets the assembler know, which then keeps loop counts and descriptors in
    // uniform registers. Without it each WGMMA waits for four moves.
    if (!tiles.locate(p, ptx::warp_uniform(number), t.index)) return false;
    // Nor does it see that the lanes leave the search for a sequence together. Drawn tiles have met already;
    // meeting twice undoes the effect.
    if constexpr (C.ragged && !C.dynamic) ptx::sync_warp();
    t.visible = {t.index.seqlen_q, t.index.seqlen_k, C.local ? p.window_left : tile::Visibility::unbounded,
                 C.causal ? p.window_right : tile::Visibility::unbounded};
    t.blocks = tile::BlockRange::of<C.block_n>(t.visible, t.index.m * C.block_m, (t.index.m + 1) * C.block_m);
    return true;
  }
};

// ---- Producer ----

/// Starts the copies, in the order in which the consumers need them: blocks go right to left, K one block
/// ahead of V. All lanes of one warp; the leader copies.
template <ForwardConfig C>
struct ForwardLoader {
  using Shared = ForwardShared<C>;

  const ForwardParams& p;
  Shared& shared;
  const bool leader;
  typename tile::Ring<C.stages>::Position k_at, v_at;
  typename tile::Ring<C.q_stages>::Position q_at;
  ForwardTiles<C> tiles;
  ForwardTile<C> t;
  int block = -1;  ///< whose V comes next

  TANDEM_DEVICE ForwardLoader(const ForwardParams& params, Shared& s)
      : p(params), shared(s), leader(ptx::elect_one()), tiles(params, s.tiles) {
    t.blocks = {0, 0, 0, 0};
  }

  TANDEM_DEVICE int row_of(int b) const { return t.index.begin_k + b * C.block_n; }
  TANDEM_DEVICE int head_kv() const { return t.index.head / (p.heads_q / p.heads_kv); }
  TANDEM_DEVICE int batch_k() const { return p.packed_k ? 0 : t.index.batch; }

  TANDEM_DEVICE void load_k(int b) {
    ptx::Mbarrier& full = shared.k_ring.acquire(k_at, Shared::KTile::bytes);
    shared.k[k_at.stage].load(p.k, full, row_of(b), head_kv(), batch_k(), ptx::CacheHint::last);
    k_at.advance();
  }
  TANDEM_DEVICE void load_v(int b) {
    ptx::Mbarrier& full = shared.v_ring.acquire(v_at, Shared::VTile::bytes);
    shared.v[v_at.stage].load(p.v, full, row_of(b), head_kv(), batch_k(), ptx::CacheHint::last);
    v_at.advance();
  }
  /// Q, with the first K after its first rows.
  TANDEM_DEVICE void load_q() {
    const int row = t.index.begin_q + t.index.m * C.block_m;
    for (int w = 0; w < C.consumers(); ++w) {
      ptx::Mbarrier& full = shared.q_ring[w].acquire(q_at, Shared::QTile::bytes);
      shared.q[w][q_at.stage].load(p.q, full, row + w * 64, t.index.head, p.packed_q ? 0 : t.index.batch,
                                   ptx::CacheHint::first);
      if (w == 0) load_k(t.blocks.end - 1);
    }
    q_at.advance();
  }

  /// What the consumers need to go one block further: the K after it, its V, and at a tile's start Q and the
  /// first K. False if there is nothing left.
  TANDEM_DEVICE bool step() {
    if (block < t.blocks.first) {
      do {
        if (!tiles.template next<true>(t, leader)) return false;
      } while (t.blocks.first >= t.blocks.end);
      block = t.blocks.end - 1;
      if (leader) load_q();
    }
    if (leader) {
      if (block > t.blocks.first) load_k(block - 1);
      load_v(block);
    }
    --block;
    return true;
  }
};

/// Stands in for the loader where a producer warp has it.
template <ForwardConfig C>
struct ForwardNoLoader {
  TANDEM_DEVICE ForwardNoLoader(const ForwardParams&, ForwardShared<C>&) {}
  TANDEM_DEVICE bool step() { return false; }
};

}  // namespace tandem
