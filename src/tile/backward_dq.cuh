// How the dQ of a block of queries leaves a CTA of the main backward kernel: consumers write it to shared
// memory, and warps of the producer's warpgroup add it to f32 sums in global memory.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "tile/backward_tiles.cuh"

namespace tandem {

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

/// Waits until the other of two warpgroups has issued its products.
TANDEM_DEVICE void pingpong_wait(int warpgroup) {
  ptx::named_barrier_sync(barrier_pingpong + warpgroup, 2 * warpgroup_size);
}
/// Lets the other of two warpgroups issue its products.
TANDEM_DEVICE void pingpong_pass(int warpgroup) {
  ptx::named_barrier_arrive(barrier_pingpong + (warpgroup ^ 1), 2 * warpgroup_size);
}

/// A consumer warpgroup's side. Each thread stores its registers in their order, 16 bytes at a time,
/// contiguous over the warp: only the conversion must know which elements they are.
template <auto C>
struct DqBuffer {
  static constexpr int vectors = C.dq_slice() / warpgroup_size / 4;  ///< 16 bytes a thread

  float* const all;  ///< that of each warpgroup
  const int warpgroup;
  const int thread;

  TANDEM_DEVICE void await() const { ptx::named_barrier_sync(barrier_dq_empty + warpgroup, dq_threads); }
  /// Stores vectors [from, to) of a slice.
  TANDEM_DEVICE void store(const float (&dq)[C.dq_columns() / 2], int slice, int from, int to) const {
    auto* target = reinterpret_cast<ptx::Float4*>(all + warpgroup * C.dq_slice()) + thread;
#pragma unroll
    for (int u = from; u < to; ++u) {
      const float* d = dq + 4 * (slice * vectors + u);
      ptx::store_shared(target + u * warpgroup_size, ptx::Float4{d[0], d[1], d[2], d[3]});
    }
  }
  /// The dQ writer's warp fences, not these 128 threads: here a fence waits 480 cycles for products in
  /// flight.
  TANDEM_DEVICE void hand_over() const {
    ptx::named_barrier_arrive(barrier_dq_full + warpgroup, dq_threads);
  }
};

/// The dQ writer: one warp, which adds the dQ of one consumer warpgroup to the sums in global memory. Unless
/// the sums have been cleared, the first tile to come stores instead. Each piece of dQ has a semaphore. In a
/// fixed order it counts the tiles that have added, and a tile waits for its number. In any order it is 0, 1
/// while the first tile stores, and then `stored`. All lanes of the warp call.
template <auto C, typename SharedType>
struct DqWriter {
  static constexpr u32 stored = 2;
  static constexpr bool adds = C.clears_sums && !C.schedule.deterministic;  ///< and reads no semaphore

  const BackwardKernelParams<C>& p;
  SharedType& shared;
  const int warpgroup;
  bool ready = false;  ///< the next piece is known to be stored

  /// Waits until this tile may write to query block m; true if it must store.
  TANDEM_DEVICE bool stores(const BackwardTile& t, int m, u32* semaphore) {
    if constexpr (C.schedule.deterministic) {
      const u32 before = BackwardTiles<C>::additions_before(t, m);
      ptx::semaphore_wait(semaphore, before);
      return before == 0;
    }
    if (adds || ready) return false;
    const u32 before = ptx::semaphore_claim(semaphore);
    if (before == 1) ptx::semaphore_wait(semaphore, stored);
    return before == 0;
  }

  /// Writes dQ of a visit's query block; `next` is that of for_visits.
  template <typename Next>
  TANDEM_DEVICE void add(const BackwardTile& t, const HeadVisit& visit, const Next& next, bool leader) {
    const int m = visit.block;
    const i64 block = workspace_block(p, visit.head, t.q_block + m);
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
        const int further = next();
        if (!adds && !C.schedule.deterministic && slice == C.dq_slices - 1)
          ready = visit.next_is_told && ptx::semaphore_read(semaphore + further * C.dq_pieces()) == stored;
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
    bool goes_on = false;  // from the tile before
    while (tiles.next(t)) {
      // When ping-pong begins, the first dQ of the first warpgroup belongs to no block.
      if (C.schedule.pingpong && warpgroup == 0 && has_visits<C>(p, t)) {
        if (!goes_on) {
          ptx::named_barrier_sync(barrier_dq_full, dq_threads);
          ptx::named_barrier_arrive(barrier_dq_empty, dq_threads);
        }
        goes_on = overlaps_next<C>(t, group);
      }
      for_visits<C>(p, t, group,
                    [&](const HeadVisit& visit, const auto& next) { add(t, visit, next, leader); });
      // The consumers run the tile's epilogue meanwhile.
      if (leader) {
        ptx::tma_store_wait_written<0>();
        ptx::semaphore_increment(tiles_added(p, t.batch, t.head_kv));
      }
    }
  }
};

}  // namespace tandem
