// The main backward kernel's shared storage, and the warp of its producer warpgroup that loads.
// tile/backward_dq.cuh has those that add dQ to the sums in global memory.
#pragma once

#include "ops/backward/config.hpp"
#include "ptx/barrier.cuh"
#include "tile/backward_dq.cuh"
#include "tile/backward_tiles.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared_tile.cuh"

namespace tandem {

// ---- Shared storage ----

/// A tile's K and V stay until it ends: there is room for the next tile's K at most.
constexpr int v_stages = 1;

/// In a cluster: the other CTA's keys, of which this CTA needs the columns that it computes of dQ. Otherwise
/// an empty base class. (As a member it would take 16 bytes and shift dQ, whose copies to global memory are
/// slow if it does not begin at a multiple of 128 bytes: 3 to 18 % of the time.)
template <BackwardConfig C, bool clustered = (C.cluster > 1)>
struct OtherKeys {
  using OtherKTile = tile::SharedTile<C.tiling.block_n, C.tiling.head_dim_qk / C.cluster, C.strip_qk()>;
  OtherKTile other_k[C.key_stages()];
};
template <BackwardConfig C>
struct OtherKeys<C, false> {
  struct OtherKTile {
    static constexpr u32 bytes = 0;
  };
};

/// Where tiles overlap: what the loader says of them, announced with K.
template <BackwardConfig C, bool overlaps = C.schedule.overlaps_tiles>
struct DescribedTiles {
  BackwardTile tiles[C.key_stages()];
  static_assert(sizeof(BackwardTile) == described_tile_bytes);
};
template <BackwardConfig C>
struct DescribedTiles<C, false> {};

template <BackwardConfig C>
struct BackwardShared : OtherKeys<C> {
  using KTile = tile::SharedTile<C.tiling.block_n, C.tiling.head_dim_qk, C.strip_qk()>;
  using VTile = tile::SharedTile<C.tiling.block_n, C.tiling.head_dim_v, C.strip_v()>;
  using QTile = tile::SharedTile<C.tiling.block_m, C.tiling.head_dim_qk, C.strip_qk()>;
  using DoutTile = tile::SharedTile<C.tiling.block_m, C.tiling.head_dim_v, C.strip_v()>;
  using ScoreTile = tile::SharedTile<C.tiling.block_n, C.tiling.block_m>;  ///< transposed: rows are keys
  static constexpr u32 row_bytes = C.tiling.block_m * sizeof(float);

  KTile k[C.key_stages()];
  VTile v[v_stages];
  QTile q[C.q_stages];
  DoutTile dout[C.dout_stages];
  /// If warpgroups own keys: dS twice. The buffer that a warpgroup writes has been read by both, so that one
  /// barrier for each query block is enough. Otherwise dS and P, and in a cluster dS of the other CTA.
  ScoreTile scores[C.cluster + 1];
  alignas(128) float dq[C.consumers * C.dq_slice()];
  float lse_log2[C.lse_stages()][C.tiling.block_m];
  float delta[C.dout_stages][C.tiling.block_m];
  float key_scale_log2[C.tiling.block_n];  ///< scale of each key's scores; NaN if the key is not finite
  u32 poisoned[C.consumers * 4];           ///< by warp: whether it has found a key that is not finite
  tile::Ring<C.key_stages()> k_ring;
  tile::Ring<v_stages> v_ring;
  tile::Ring<C.q_stages> q_ring;
  tile::Ring<C.dout_stages> dout_ring;
  ptx::Mbarrier ds_full;   ///< dS of the other CTA has come
  ptx::Mbarrier ds_empty;  ///< the other CTA has read this CTA's dS
  DescribedTiles<C> described;
};

// ---- Producer ----

template <BackwardConfig C>
struct BackwardLoader {
  using Shared = BackwardShared<C>;

  const BackwardKernelParams<C>& p;
  Shared& shared;
  typename tile::Ring<C.key_stages()>::Position k_at;
  tile::Ring<v_stages>::Position v_at;
  typename tile::Ring<C.q_stages>::Position q_at;
  typename tile::Ring<C.dout_stages>::Position dout_at;

  TANDEM_DEVICE BackwardLoader(const BackwardKernelParams<C>& params, Shared& s) : p(params), shared(s) {}

  TANDEM_DEVICE void load_k(const BackwardTile& t) {
    shared.k_ring.wait_free(k_at);
    if constexpr (C.schedule.overlaps_tiles) ptx::store_shared(&shared.described.tiles[k_at.stage], t);
    ptx::Mbarrier& full = shared.k_ring.announce(k_at, Shared::KTile::bytes + Shared::OtherKTile::bytes);
    const int batch = p.packed_k ? 0 : t.batch;
    shared.k[k_at.stage].load(p.k, full, t.begin_k + t.first_key, t.head_kv, batch, ptx::CacheHint::first);
    if constexpr (C.cluster > 1) {
      shared.other_k[k_at.stage].load(p.k, full, t.begin_k + t.first_key + BackwardTiles<C>::other_keys(),
                                      t.head_kv, batch, ptx::CacheHint::first,
                                      BackwardTiles<C>::rank() * (C.tiling.head_dim_qk / C.cluster));
    }
  }
  TANDEM_DEVICE void load_v(const BackwardTile& t) {
    ptx::Mbarrier& full = shared.v_ring.acquire(v_at, Shared::VTile::bytes);
    shared.v[v_at.stage].load(p.v, full, t.begin_k + t.first_key, t.head_kv, p.packed_k ? 0 : t.batch,
                              ptx::CacheHint::first);
  }
  static constexpr bool lse_with_dout = C.schedule.overlaps_tiles;
  TANDEM_DEVICE void load_lse(const BackwardTile& t, int head, int m, int stage, ptx::Mbarrier& full) {
    ptx::bulk_load(shared.lse_log2[stage],
                   p.lse_log2 + workspace_block(p, head, t.q_block + m) * C.tiling.block_m, Shared::row_bytes,
                   full);
  }
  TANDEM_DEVICE void load_q(const BackwardTile& t, int head, int m) {
    constexpr u32 lse_bytes = lse_with_dout ? 0 : Shared::row_bytes;
    ptx::Mbarrier& full = shared.q_ring.acquire(q_at, Shared::QTile::bytes + lse_bytes);
    shared.q[q_at.stage].load(p.q, full, t.begin_q + m * C.tiling.block_m, head, p.packed_q ? 0 : t.batch,
                              ptx::CacheHint::last);
    if constexpr (!lse_with_dout) load_lse(t, head, m, q_at.stage, full);
    q_at.advance();
  }
  TANDEM_DEVICE void load_dout(const BackwardTile& t, int head, int m) {
    constexpr u32 lse_bytes = lse_with_dout ? Shared::row_bytes : 0;
    ptx::Mbarrier& full =
        shared.dout_ring.acquire(dout_at, Shared::DoutTile::bytes + Shared::row_bytes + lse_bytes);
    shared.dout[dout_at.stage].load(p.dout_map, full, t.begin_q + m * C.tiling.block_m, head,
                                    p.packed_q ? 0 : t.batch, ptx::CacheHint::last);
    ptx::bulk_load(shared.delta[dout_at.stage],
                   p.delta + workspace_block(p, head, t.q_block + m) * C.tiling.block_m, Shared::row_bytes,
                   full);
    if constexpr (lse_with_dout) load_lse(t, head, m, dout_at.stage, full);
    dout_at.advance();
  }

  /// Reads V to the L2: its buffer is free only when it is wanted.
  TANDEM_DEVICE void prefetch_v(const BackwardTile& t) {
    Shared::VTile::prefetch(p.v, t.begin_k + t.first_key, t.head_kv, p.packed_k ? 0 : t.batch);
  }
  /// Where tiles overlap: there is no other.
  TANDEM_DEVICE void announce_end() {
    shared.k_ring.wait_free(k_at);
    ptx::store_shared(&shared.described.tiles[k_at.stage], BackwardTile{});
    shared.k_ring.hand_over(k_at);
  }

  /// All lanes of one warp.
  TANDEM_DEVICE void run() {
    const bool leader = ptx::elect_one();
    const int group = p.heads_q / p.heads_kv;
    BackwardTiles<C> tiles(p);
    BackwardTile t;
    while (tiles.next(t)) {
      if (!has_visits<C>(p, t)) continue;
      if (leader) {
        load_k(t);
        if constexpr (C.schedule.overlaps_tiles) {
          prefetch_v(t);
        } else {
          load_v(t);
        }
        // K and V are the caller's; LSE and delta come from the previous kernel. (To wait at every tile takes
        // no register; a flag would, and kernels of 256 columns with lengths and a mask have none left.)
        ptx::wait_for_previous_grid();
        // The convert kernel waits for each head by itself, and may start where CTAs have ended. It is
        // announced with the second tile: if there is only one tile for each CTA, it would take SMs that
        // other kernels could use.
        if (tiles.round > 1) ptx::launch_next_grid();
        for_visits<C>(p, t, group, [&](const HeadVisit& visit, const auto&) {
          load_q(t, visit.head, visit.block);
          load_dout(t, visit.head, visit.block);
          // The last tile's V is free one block before its K.
          if (C.schedule.overlaps_tiles && visit.first) load_v(t);
        });
        // Wide heads compute the scores of one block too many, and do not use them.
        if constexpr (!C.owns_keys()) {
          load_q(t, t.head_kv * group, t.blocks.first);
          load_dout(t, t.head_kv * group, t.blocks.first);
        }
      }
      k_at.advance();
      v_at.advance();
    }
    if constexpr (C.schedule.overlaps_tiles) {
      if (leader) announce_end();
    }
    ptx::wait_for_previous_grid();
    ptx::launch_next_grid();
  }
};

}  // namespace tandem
