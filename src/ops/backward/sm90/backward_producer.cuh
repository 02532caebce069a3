// The main backward kernel's shared storage, and the warps of its producer warpgroup: one loads, and one for
// each consumer warpgroup adds its dQ to the sums in global memory.
#pragma once

#include "ops/backward/config.hpp"
#include "ptx/barrier.cuh"
#include "tile/backward_tiles.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared_tile.cuh"

namespace tandem {

// ---- Shared storage ----

/// A tile's K and V stay until it ends: there is no room for the next tile's before.
constexpr int kv_stages = 1;

/// In a cluster: the other CTA's keys, of which this CTA needs the columns that it computes of dQ. Otherwise
/// an empty base class. (As a member it would take 16 bytes and shift dQ, whose copies to global memory are
/// slow if it does not begin at a multiple of 128 bytes: 3 to 18 % of the time.)
template <BackwardConfig C, bool clustered = (C.cluster > 1)>
struct OtherKeys {
  using OtherKTile = tile::SharedTile<C.tiling.block_n, C.tiling.head_dim_qk / C.cluster, C.strip_qk()>;
  OtherKTile other_k[kv_stages];
};
template <BackwardConfig C>
struct OtherKeys<C, false> {
  struct OtherKTile {
    static constexpr u32 bytes = 0;
  };
};

template <BackwardConfig C>
struct BackwardShared : OtherKeys<C> {
  using KTile = tile::SharedTile<C.tiling.block_n, C.tiling.head_dim_qk, C.strip_qk()>;
  using VTile = tile::SharedTile<C.tiling.block_n, C.tiling.head_dim_v, C.strip_v()>;
  using QTile = tile::SharedTile<C.tiling.block_m, C.tiling.head_dim_qk, C.strip_qk()>;
  using DoutTile = tile::SharedTile<C.tiling.block_m, C.tiling.head_dim_v, C.strip_v()>;
  using ScoreTile = tile::SharedTile<C.tiling.block_n, C.tiling.block_m>;  ///< transposed: rows are keys
  static constexpr u32 row_bytes = C.tiling.block_m * sizeof(float);

  KTile k[kv_stages];
  VTile v[kv_stages];
  QTile q[C.q_stages];
  DoutTile dout[C.dout_stages];
  /// If warpgroups own keys: dS twice. The buffer that a warpgroup writes has been read by both, so that one
  /// barrier for each query block is enough. Otherwise dS and P, and in a cluster dS of the other CTA.
  ScoreTile scores[C.cluster + 1];
  alignas(128) float dq[C.consumers * C.dq_slice()];
  float lse_log2[C.q_stages][C.tiling.block_m];
  float delta[C.dout_stages][C.tiling.block_m];
  float key_scale_log2[C.tiling.block_n];  ///< scale of each key's scores; NaN if the key is not finite
  u32 poisoned[C.consumers * 4];           ///< by warp: whether it has found a key that is not finite
  tile::Ring<kv_stages> k_ring;
  tile::Ring<kv_stages> v_ring;
  tile::Ring<C.q_stages> q_ring;
  tile::Ring<C.dout_stages> dout_ring;
  ptx::Mbarrier ds_full;   ///< dS of the other CTA has come
  ptx::Mbarrier ds_empty;  ///< the other CTA has read this CTA's dS
};

/// Named barriers.
enum BackwardBarrier : int {
  barrier_joined = 1,    ///< joins the consumers
  barrier_dq_full = 2,   ///< guards a warpgroup's buffer of dQ, which has been written; 2 to 4
  barrier_dq_empty = 5,  ///< guards it, which has been read; 5 to 7
  barrier_p_full = 8,    ///< this and the next three order the two warpgroups of wide heads
  barrier_ds_full = 9,
  barrier_ds_own = 10,
  barrier_met = 11,       ///< and 12
  barrier_pingpong = 13,  ///< admits a warpgroup to the tensor cores; 13 and 14
};
constexpr int dq_threads = warpgroup_size + warp_size;

// ---- Producer ----

template <BackwardConfig C>
struct BackwardLoader {
  using Shared = BackwardShared<C>;

  const BackwardKernelParams<C>& p;
  Shared& shared;
  tile::Ring<kv_stages>::Position k_at;
  tile::Ring<kv_stages>::Position v_at;
  typename tile::Ring<C.q_stages>::Position q_at;
  typename tile::Ring<C.dout_stages>::Position dout_at;

  TANDEM_DEVICE BackwardLoader(const BackwardKernelParams<C>& params, Shared& s) : p(params), shared(s) {}

  TANDEM_DEVICE void load_k(const BackwardTile& t) {
    ptx::Mbarrier& full = shared.k_ring.acquire(k_at, Shared::KTile::bytes + Shared::OtherKTile::bytes);
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
  TANDEM_DEVICE void load_q(const BackwardTile& t, int head, int m) {
    ptx::Mbarrier& full = shared.q_ring.acquire(q_at, Shared::QTile::bytes + Shared::row_bytes);
    shared.q[q_at.stage].load(p.q, full, t.begin_q + m * C.tiling.block_m, head, p.packed_q ? 0 : t.batch,
                              ptx::CacheHint::last);
    ptx::bulk_load(shared.lse_log2[q_at.stage],
                   p.lse_log2 + workspace_block(p, head, t.q_block + m) * C.tiling.block_m, Shared::row_bytes,
                   full);
    q_at.advance();
  }
  TANDEM_DEVICE void load_dout(const BackwardTile& t, int head, int m) {
    ptx::Mbarrier& full = shared.dout_ring.acquire(dout_at, Shared::DoutTile::bytes + Shared::row_bytes);
    shared.dout[dout_at.stage].load(p.dout_map, full, t.begin_q + m * C.tiling.block_m, head,
                                    p.packed_q ? 0 : t.batch, ptx::CacheHint::last);
    ptx::bulk_load(shared.delta[dout_at.stage],
                   p.delta + workspace_block(p, head, t.q_block + m) * C.tiling.block_m, Shared::row_bytes,
                   full);
    dout_at.advance();
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
        load_v(t);
        // K and V are the caller's; LSE and delta come from the previous kernel. (To wait at every tile takes
        // no register; a flag would, and kernels of 256 columns with lengths and a mask have none left.)
        ptx::wait_for_previous_grid();
        // The convert kernel waits for each head by itself, and may start where CTAs have ended. It is
        // announced with the second tile: if there is only one tile for each CTA, it would take SMs that
        // other kernels could use.
        if (tiles.round > 1) ptx::launch_next_grid();
#pragma unroll 1
        for (int g = 0; g < group; ++g) {
          const QueryVisits<C> visits{p, t, t.head_kv * group + g};
          const int end = visits.end();
#pragma unroll 1
          for (int i = visits.first(); i < end; ++i) {
            const int block = BackwardTiles<C>::passing(t, visits.at(i).block);
            load_q(t, t.head_kv * group + g, block);
            load_dout(t, t.head_kv * group + g, block);
          }
        }
        // Wide heads compute the scores of one block too many, and do not use them.
        if constexpr (!C.owns_keys()) {
          load_q(t, t.head_kv * group, t.blocks.first);
          load_dout(t, t.head_kv * group, t.blocks.first);
        }
      }
      k_at.advance();
      v_at.advance();
    }
    ptx::wait_for_previous_grid();
    ptx::launch_next_grid();
  }
};

/// The dQ writer: one warp, which adds the dQ of one consumer warpgroup to the sums in global memory. The
/// first tile to come stores instead, so that the sums need not be cleared. Each piece of dQ has a semaphore.
/// In a fixed order it counts the tiles that have added, and a tile waits for its number. In any order it is
/// 0, 1 while the first tile stores, and then `stored`. All lanes of the warp call.
template <BackwardConfig C>
struct DqWriter {
  static constexpr u32 stored = 2;

  const BackwardKernelParams<C>& p;
  BackwardShared<C>& shared;
  const int warpgroup;
  bool ready = false;  ///< the next piece is known to be stored

  /// Waits until this tile may write to query block m; true if it must store.
  TANDEM_DEVICE bool stores(const BackwardTile& t, int m, u32* semaphore) {
    if constexpr (C.schedule.deterministic) {
      const u32 before = BackwardTiles<C>::additions_before(t, m);
      ptx::semaphore_wait(semaphore, before);
      return before == 0;
    }
    if (ready) return false;
    const u32 before = ptx::semaphore_claim(semaphore);
    if (before == 1) ptx::semaphore_wait(semaphore, stored);
    return before == 0;
  }

  /// Writes dQ of visit i of a head's query blocks.
  TANDEM_DEVICE void add(const QueryVisits<C>& visits, int i, int end, bool leader) {
    const BackwardTile& t = visits.t;
    const auto block_of = [&](int visit) { return BackwardTiles<C>::passing(t, visits.at(visit).block); };
    const int m = block_of(i);
    const i64 block = workspace_block(p, visits.head, t.q_block + m);
    const int piece = BackwardTiles<C>::rank() * C.consumers + warpgroup;
    u32* semaphore = p.dq_semaphores + block * C.dq_pieces() + piece;
    float* target = p.dq_sum + block * (C.tiling.block_m * C.tiling.head_dim_qk) + piece * C.dq_values();
    const float* source = shared.dq + warpgroup * C.dq_slice();
    bool storing = false;
#pragma unroll
    for (int slice = 0; slice < C.dq_slices; ++slice) {
      ptx::named_barrier_sync(barrier_dq_full + warpgroup, dq_threads);
      if (leader) {
        ptx::fence_async_shared();
        if (slice == 0) storing = stores(t, m, semaphore);
        if (storing) {
          ptx::bulk_store(target + slice * C.dq_slice(), source, C.dq_slice() * sizeof(float));
        } else {
          ptx::bulk_reduce_add(target + slice * C.dq_slice(), source, C.dq_slice() * sizeof(float));
        }
        ptx::tma_store_commit();
        // Reads the next block's semaphore while this block is on its way.
        const int next = (C.functions.block_lists && i + 1 == end ? m : block_of(i + 1)) - m;
        if (!C.schedule.deterministic && slice == C.dq_slices - 1)
          ready = i + 1 < end && ptx::semaphore_read(semaphore + next * C.dq_pieces()) == stored;
        ptx::tma_store_wait<0>();
      }
      ptx::sync_warp();
      ptx::named_barrier_arrive(barrier_dq_empty + warpgroup, dq_threads);
    }
    if (leader && (C.schedule.deterministic || storing)) {
      ptx::tma_store_wait_written<0>();
      ptx::semaphore_increment(semaphore);
    }
  }

  TANDEM_DEVICE void run() {
    const bool leader = ptx::elect_one();
    const int group = p.heads_q / p.heads_kv;
    BackwardTiles<C> tiles(p);
    BackwardTile t;
    ptx::wait_for_previous_grid();
    ptx::named_barrier_arrive(barrier_dq_empty + warpgroup, dq_threads);
    while (tiles.next(t)) {
      // With ping-pong, the first dQ of a tile from the first warpgroup belongs to no block.
      if (C.schedule.pingpong && warpgroup == 0 && has_visits<C>(p, t)) {
        ptx::named_barrier_sync(barrier_dq_full, dq_threads);
        ptx::named_barrier_arrive(barrier_dq_empty, dq_threads);
      }
#pragma unroll 1
      for (int g = 0; g < group; ++g) {
        const QueryVisits<C> visits{p, t, t.head_kv * group + g};
        const int end = visits.end();
#pragma unroll 1
        for (int i = visits.first(); i < end; ++i) add(visits, i, end, leader);
      }
      // The consumers run the tile's epilogue meanwhile.
      if (leader) {
        ptx::tma_store_wait_written<0>();
        ptx::semaphore_increment(tiles_added(p, t.batch, t.head_kv));
      }
    }
  }
};

}  // namespace tandem
