// What the consumer warpgroups of the main backward kernel do with one query block, piece by piece: products,
// arithmetic, and the transport of dQ. backward.cuh has the order of the pieces, and backward_wide.cuh that
// of wide heads.
#pragma once

#include "ops/backward/config.hpp"
#include "ops/backward/sm90/backward_producer.cuh"
#include "ptx/barrier.cuh"
#include "tile/backward_scores.cuh"
#include "tile/poisoned_keys.cuh"

namespace tandem {

/// Where tiles overlap: how many of a warpgroup's next dQ are of the tile before the one whose scores it has.
template <bool overlaps>
struct LateDq {
  int late = 0;
};
template <>
struct LateDq<false> {};

template <BackwardConfig C>
struct BackwardConsumer : tile::BackwardScores<C, BackwardShared<C>>, LateDq<C.schedule.overlaps_tiles> {
  using Base = tile::BackwardScores<C, BackwardShared<C>>;
  using Shared = BackwardShared<C>;
  using QPosition = typename Base::QPosition;
  using DoutPosition = typename Base::DoutPosition;
  using Base::dq_column_at;
  using Base::dq_row_group;
  using Base::group;
  using Base::hides;
  using Base::key_at;
  using Base::p;
  using Base::position;
  using Base::scores;
  using Base::shared;
  using Base::slopes;
  using Base::thread;
  using Base::threads;
  using Base::warpgroup;

  using Base::dout_at;
  using Base::k_at;
  using Base::q_at;
  using Base::v_at;
  tile::RingPosition<2> score_at;  ///< narrow heads: which of the two tiles dS is written to
  u32 exchange = 0;                ///< wide heads, in a cluster: parity of the query block

  using Base::Base;

  TANDEM_DEVICE typename Shared::KTile& k() { return shared.k[k_at.stage]; }
  TANDEM_DEVICE typename Shared::OtherKTile& other_k() { return shared.other_k[k_at.stage]; }
  TANDEM_DEVICE typename Shared::VTile& v() { return shared.v[v_at.stage]; }
  /// This warpgroup's first column of dQ, as a column of K. (Of the other CTA's keys, shared memory has only
  /// the columns that this CTA computes of dQ.)
  TANDEM_DEVICE int k_column_of_rank() const {
    return BackwardTiles<C>::rank() * (C.tiling.head_dim_qk / C.cluster) + dq_column_at();
  }

  /// Where products are issued at three places in the code, ptxas would keep 100 shared-memory addresses for
  /// them, spill some, and move them with 60 to 90 R2UR a step.
  static TANDEM_DEVICE void separate(ptx::MatrixDescriptor& a, ptx::MatrixDescriptor& b) {
    if constexpr (C.owns_keys() && !C.schedule.pingpong) return;
    ptx::forget_address(a);
    ptx::forget_address(b);
  }

  /// Stands for nothing between the steps of a product.
  struct Nothing {
    TANDEM_DEVICE void operator()(int) const {}
  };

  /// Issues S^T = K Q^T or dP^T = V dO^T.
  template <int head_dim, typename Keys, typename Queries>
  TANDEM_DEVICE void issue_scores(float (&s)[scores], const Keys& keys, const Queries& queries) {
    ptx::MatrixDescriptor a = keys.k_major() + static_cast<u32>(key_at()) * Keys::row_bytes;
    ptx::MatrixDescriptor b = queries.k_major();
    separate(a, b);
#pragma unroll
    for (int step = 0; step < head_dim / 16; ++step) {
      ptx::wgmma_shared<C.tiling.block_m, C.tiling.element, false>(
          s, a + Keys::k_major_offset(step), b + Queries::k_major_offset(step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Issues dV += P^T dO or dK += dS^T Q; `beside(i)` is called after step i is issued.
  template <int columns, typename Rows, typename Beside = Nothing>
  TANDEM_DEVICE void issue_gradient(float (&d)[columns / 2], const u32 (&operand)[scores / 2],
                                    const Rows& rows, Beside beside = {}) {
    const ptx::MatrixDescriptor b = rows.mn_major();
#pragma unroll
    for (int step = 0; step < C.tiling.block_m / 16; ++step) {
      ptx::wgmma_registers<columns, C.tiling.element, true>(d, operand + 4 * step,
                                                            b + Rows::mn_major_offset(step), true);
      beside(step);
    }
    ptx::wgmma_commit();
  }

  /// Issues dQ = dS K, or dQ += dS K, for this warpgroup's columns of dQ, which begin at `column` of the
  /// keys.
  template <bool add, typename Keys>
  TANDEM_DEVICE void issue_dq(float (&dq)[C.dq_columns() / 2], const typename Shared::ScoreTile& ds,
                              const Keys& keys, int column) {
    // The score tile is transposed, so its columns are queries: a strip of 64 is an operand with M
    // contiguous.
    ptx::MatrixDescriptor a =
        ds.mn_major() + static_cast<u32>(dq_row_group()) * Shared::ScoreTile::strip_bytes;
    ptx::MatrixDescriptor b =
        keys.mn_major() + static_cast<u32>(column / Keys::strip_cols) * Keys::strip_bytes;
    separate(a, b);
#pragma unroll
    for (int step = 0; step < C.tiling.block_n / 16; ++step) {
      ptx::wgmma_shared<C.dq_columns(), C.tiling.element, true, true>(
          dq, a + Shared::ScoreTile::mn_major_offset(step), b + Keys::mn_major_offset(step),
          add || step != 0);
    }
    ptx::wgmma_commit();
  }
  /// Issues dQ = dS K for this CTA's keys.
  TANDEM_DEVICE void issue_dq(float (&dq)[C.dq_columns() / 2], const typename Shared::ScoreTile& ds) {
    if constexpr (C.schedule.overlaps_tiles) {
      issue_dq<false>(dq, ds, shared.k[this->late > 0 ? k_at.stage ^ 1 : k_at.stage], k_column_of_rank());
    } else {
      issue_dq<false>(dq, ds, k(), k_column_of_rank());
    }
  }

  /// Writes this warpgroup's slice of a transposed score tile: four 8 x 8 matrices at a time.
  TANDEM_DEVICE void store_scores(typename Shared::ScoreTile& target, const u32 (&packed)[scores / 2]) {
    // Where tiles overlap, there are no registers to keep addresses from tile to tile.
    const int lane = thread % warp_size;
    const int row = key_at() + thread / warp_size * 16;
    const int lane_row = lane % 16;
    const int col = lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < C.tiling.block_m / 16; ++j) {
      char* const at = C.schedule.overlaps_tiles
                           ? target.address(row, 16 * j, static_cast<u32>(lane_row), static_cast<u32>(col))
                           : target.address(row + lane_row, col + 16 * j);
      ptx::stmatrix_x4(at, packed[4 * j], packed[4 * j + 1], packed[4 * j + 2], packed[4 * j + 3]);
    }
  }

  /// Hands dQ to the warp that adds it to the sums.
  TANDEM_DEVICE void store_dq(const float (&dq)[C.dq_columns() / 2]) {
#pragma unroll
    for (int slice = 0; slice < C.dq_slices; ++slice) store_dq(dq, slice);
  }
  TANDEM_DEVICE void store_dq(const float (&dq)[C.dq_columns() / 2], int slice) {
    const DqBuffer<C> buffer = dq_buffer();
    buffer.await();
    buffer.store(dq, slice, 0, dq_vectors);
    buffer.hand_over();
  }
  static constexpr int dq_vectors = DqBuffer<C>::vectors;
  TANDEM_DEVICE DqBuffer<C> dq_buffer() {
    return {shared.dq, warpgroup, thread};
  }

  /// All consumers wait for each other. With wide heads the two warpgroups run different code, and
  /// compute-sanitizer's synccheck reports threads that wait for each other at two different instructions:
  /// therefore one arrives at a barrier at which the other waits, and the other way round.
  TANDEM_DEVICE void meet() {
    if constexpr (C.owns_keys()) {
      ptx::named_barrier_sync(barrier_joined, threads);
    } else if (warpgroup == 0) {
      ptx::named_barrier_arrive(barrier_met, threads);
      ptx::named_barrier_sync(barrier_met + 1, threads);
    } else {
      ptx::named_barrier_sync(barrier_met, threads);
      ptx::named_barrier_arrive(barrier_met + 1, threads);
    }
  }
  TANDEM_DEVICE void join() {
    ptx::fence_async_shared();
    meet();
  }

  // Rows of the tiles in shared memory that must not be multiplied: backward_clear.cuh
  TANDEM_DEVICE void clear_key_tail(const BackwardTile& t);
  TANDEM_DEVICE void clear_queries(QPosition q_to, DoutPosition dout_to, int first, int end);
  template <bool masked>
  TANDEM_DEVICE void clear_unseeing_queries(const BackwardTile& t, int m, QPosition q_to,
                                            DoutPosition dout_to);
  TANDEM_DEVICE void clear_blind_queries(QPosition q_to, DoutPosition dout_to);

  /// The lane that releases for its warp.
  TANDEM_DEVICE bool releases() const {
    const int lane = C.schedule.overlaps_tiles ? static_cast<int>(ptx::lane_index_anew()) : thread;
    return lane % warp_size == 0;
  }
  TANDEM_DEVICE void release_q() {
    if (releases()) shared.q_ring.release(q_at);
    q_at.advance();
  }
  TANDEM_DEVICE void release_dout() {
    if (releases()) shared.dout_ring.release(dout_at);
    dout_at.advance();
  }

  /// Waits for Q of query block m, and issues S^T.
  template <bool masked = true>
  TANDEM_DEVICE void begin_scores(const BackwardTile& t, int m, float (&s)[scores]) {
    shared.q_ring.wait(q_at);
    clear_unseeing_queries<masked>(t, m, q_at, dout_at);
    ptx::wgmma_fence();
    issue_scores<C.tiling.head_dim_qk>(s, k(), shared.q[q_at.stage]);
  }
  /// Waits for a tile's K and V, and clears what must not be multiplied.
  TANDEM_DEVICE void begin_tile(const BackwardTile& t) {
    shared.k_ring.wait(k_at);
    if constexpr (C.functions.given()) this->set_keys(p, t, key_at(), position);
    if constexpr (hides) tile::clear_poisoned_keys<C>(*this);
    shared.v_ring.wait(v_at);
    if constexpr (C.mask.varlen) {
      if ((t.n + 1) * C.tile_keys() > t.visible.seqlen_k) clear_key_tail(t);
    }
  }
  TANDEM_DEVICE void end_tile() {
    if (thread % warp_size == 0) {
      shared.k_ring.release(k_at);
      shared.v_ring.release(v_at);
    }
    k_at.advance();
    v_at.advance();
  }
};

}  // namespace tandem
