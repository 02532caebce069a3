// The backward pass: dQ, dK and dV from dO, with the scores computed again. A persistent kernel with one CTA
// an SM.
//
// A CTA owns a tile of keys (or half of one, in a cluster of two). K and V of the tile stay in shared memory,
// dK and dV in registers, and the CTA loops over the query blocks that see the tile, for every query head of
// the group. For each query block:
//
//   S^T = K Q^T      P^T = 2^(scale log2(e) S^T - LSE)      dV += P^T dO
//   dP^T = V dO^T    dS^T = P^T (dP^T - delta)              dK += dS^T Q      dQ = dS K
//
// Scores are computed transposed, so that P^T and dS^T lie in registers as the products for dV and dK read
// their first operand. A producer warp loads Q and dO. The other warps of its warpgroup add dQ to f32 sums in
// global memory through TMA. Method: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), section 3 and
// appendix B. docs/kernels/backward.md has the arithmetic.
//
// Up to head dimension 128 each of the two consumer warpgroups owns the dK and dV of 64 keys, and they may
// alternate at the tensor cores (ping-pong); this file has their order of steps. For wider heads
// backward_wide.cuh has it.
#pragma once

#include "ops/backward/config.hpp"
#include "ops/backward/sm90/backward_clear.cuh"
#include "ops/backward/sm90/backward_consumer.cuh"
#include "ops/backward/sm90/backward_overlap.cuh"
#include "ops/backward/sm90/backward_wide.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "tile/select.cuh"

namespace tandem {

// ---- Consumer ----

template <BackwardConfig C>
struct NarrowBackwardConsumer : OverlapConsumer<C> {
  using Base = OverlapConsumer<C>;
  using Base::Base;
  using Base::dout_at;
  using Base::group;
  using Base::p;
  using Base::q_at;
  using Base::score_at;
  using Base::scores;
  using Base::shared;
  using Base::slopes;
  using Base::thread;
  using Base::threads;
  using Base::warpgroup;

  static constexpr bool overlaps = C.schedule.overlaps_tiles;
  /// All blocks go with the mask: for two such steps ptxas has too few registers, and serialises the
  /// products.
  static constexpr bool one_step = C.functions.captured_gradients;

  /// Query block m: products and arithmetic in sequence.
  template <bool masked>
  TANDEM_DEVICE void step(const BackwardTile& t, int m, float (&dk)[C.tiling.head_dim_qk / 2],
                          float (&dv)[C.tiling.head_dim_v / 2]) {
    float s[scores];
    float dp[scores];
    float dq[C.dq_columns() / 2];
    u32 p_packed[scores / 2];
    u32 p_sloped[slopes];
    u32 ds_packed[scores / 2];
    auto& ds_tile = shared.scores[score_at.stage];

    this->template begin_scores<masked>(t, m, s);
    shared.dout_ring.wait(dout_at);
    this->template issue_scores<C.tiling.head_dim_v>(dp, this->v(), shared.dout[dout_at.stage]);
    if constexpr (C.functions.dropout) this->draw(t, m);
    ptx::wgmma_wait<1>();
    ptx::pin_registers(s);
    this->template probabilities<masked>(t, m, s, p_packed, p_sloped);
    u32 inputs[Base::kept_inputs];
    if constexpr (C.functions.captured_gradients) this->keep_inputs(s, inputs);
    u32 p_whole[Base::whole_p];
    this->keep_whole(p_whole, p_packed);
    if constexpr (C.functions.dropout) this->drop(p_packed);
    if constexpr (C.keeps_p()) {
      ptx::wgmma_wait<0>();
      ptx::pin_registers(dp);
      this->score_gradients(ds_packed, p_packed, s, dp);
    }
    ptx::wgmma_fence();
    this->template issue_gradient<C.tiling.head_dim_v>(dv, p_packed, shared.dout[dout_at.stage]);
    if constexpr (!C.keeps_p()) {
      ptx::wgmma_wait<1>();
      ptx::pin_registers(dp);
      if constexpr (C.functions.dropout) this->drop(dp);
      this->score_gradients(ds_packed, p_packed, p_sloped, dp);
    }
    this->store_scores(ds_tile, ds_packed);
    ptx::wgmma_fence();
    this->template issue_gradient<C.tiling.head_dim_qk>(dk, ds_packed, shared.q[q_at.stage]);
    this->add_captured_gradients(t, m, inputs, p_whole, p_packed, dp);
    this->join();
    ptx::wgmma_fence();
    this->issue_dq(dq, ds_tile);
    ptx::wgmma_wait<2>();
    ptx::pin_registers(dv);
    this->release_dout();
    ptx::wgmma_wait<1>();
    ptx::pin_registers(dk);
    this->release_q();
    ptx::wgmma_wait<0>();
    ptx::pin_registers(dq);
    this->store_dq(dq);
    score_at.advance();
  }

  /// What a query block follows in ping-pong: nothing, or the last block of the tile before, or one of its
  /// own tile.
  enum class Follows { nothing, tile, block };

  /// As step, with ping-pong. When this warpgroup has the tensor cores, it issues dQ, dV and dK of the
  /// previous query block and the scores of block m, one after the other. The arithmetic of block m then runs
  /// under the other warpgroup's products. dS of this warpgroup is in shared memory when it has the tensor
  /// cores next, dS of the other one when that has them again: so the first warpgroup computes dQ of the
  /// block before the previous one, the second that of the previous one. `last`: it is the tile's last block.
  template <bool masked, Follows follows>
  TANDEM_DEVICE void step_pingpong(const BackwardTile& t, int m, u32 (&p_packed)[scores / 2],
                                   u32 (&ds_packed)[scores / 2], float (&dk)[C.tiling.head_dim_qk / 2],
                                   float (&dv)[C.tiling.head_dim_v / 2], bool last = false) {
    constexpr bool first = follows == Follows::nothing;
    float s[scores];
    float dp[scores];
    auto q_to = q_at;
    auto dout_to = dout_at;
    if constexpr (!first) {
      q_to.advance();
      dout_to.advance();
    }
    shared.q_ring.wait(q_to);
    this->anew_if_overlapping().template clear_unseeing_queries<masked>(t, m, q_to, dout_to);
    pingpong_wait(warpgroup);
    ptx::wgmma_fence();
    if constexpr (!first) {
      float dq[C.dq_columns() / 2];
      this->issue_dq(dq, shared.scores[score_at.stage ^ warpgroup]);
      this->template issue_gradient<C.tiling.head_dim_v>(dv, p_packed, shared.dout[dout_at.stage]);
      ptx::wgmma_wait<1>();
      ptx::pin_registers(dq);
      ptx::wgmma_fence();
      auto&& storing = this->anew_if_overlapping();
      this->template issue_gradient<C.tiling.head_dim_qk>(dk, ds_packed, shared.q[q_at.stage], [&](int i) {
        constexpr int steps = C.tiling.block_m / 16;
        if (i == 0) this->dq_buffer().await();
        storing.dq_buffer().store(dq, 0, i * Base::dq_vectors / steps, (i + 1) * Base::dq_vectors / steps);
      });
      ptx::wgmma_wait<0>();
      ptx::pin_registers(dv);
      ptx::pin_registers(dk);
      ptx::wgmma_fence();
    }
    this->template issue_scores<C.tiling.head_dim_qk>(s, this->k(), shared.q[q_to.stage]);
    shared.dout_ring.wait(dout_to);
    if constexpr (overlaps && follows != Follows::block) shared.v_ring.wait(this->v_position());
    this->template issue_scores<C.tiling.head_dim_v>(dp, this->v(), shared.dout[dout_to.stage]);
    pingpong_pass(warpgroup);
    if constexpr (!first) {
      this->dq_buffer().hand_over();
      this->release_dout();
      this->release_q();
    }
    if constexpr (overlaps && follows == Follows::tile) this->anew().store_tile(this->k_at.stage ^ 1, dk, dv);
    if constexpr (overlaps && !first) this->count_dq();
    ptx::wgmma_wait<1>();
    ptx::pin_registers(s);
    u32 p_sloped[slopes];
    auto&& arithmetic = this->anew_if_overlapping();
    arithmetic.template probabilities<masked>(t, m, s, p_packed, p_sloped);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(dp);
    if constexpr (overlaps) this->release_v(last);
    if constexpr (C.keeps_p()) {
      arithmetic.score_gradients(ds_packed, p_packed, s, dp);
    } else {
      arithmetic.score_gradients(ds_packed, p_packed, p_sloped, dp);
    }
    arithmetic.store_scores(shared.scores[score_at.stage], ds_packed);
    ptx::fence_async_shared();
    score_at.advance();
  }

  /// dV and dK of the last block, and the dQ that is left. Waits for the tensor cores twice.
  TANDEM_DEVICE void finish_pingpong(const u32 (&p_packed)[scores / 2], const u32 (&ds_packed)[scores / 2],
                                     float (&dk)[C.tiling.head_dim_qk / 2],
                                     float (&dv)[C.tiling.head_dim_v / 2]) {
    float dq[C.dq_columns() / 2];
    pingpong_wait(warpgroup);
    ptx::wgmma_fence();
    this->template issue_gradient<C.tiling.head_dim_v>(dv, p_packed, shared.dout[dout_at.stage]);
    this->template issue_gradient<C.tiling.head_dim_qk>(dk, ds_packed, shared.q[q_at.stage]);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(dv);
    ptx::pin_registers(dk);
    ptx::wgmma_fence();
    this->issue_dq(dq, shared.scores[score_at.stage ^ warpgroup]);
    pingpong_pass(warpgroup);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(dq);
    this->release_dout();
    this->release_q();
    if constexpr (overlaps) this->count_dq();
    this->store_dq(dq);
    pingpong_wait(warpgroup);
    if (warpgroup == 0) {
      ptx::wgmma_fence();
      this->issue_dq(dq, shared.scores[score_at.stage ^ 1]);
      ptx::wgmma_wait<0>();
      ptx::pin_registers(dq);
      this->store_dq(dq);
    }
    pingpong_pass(warpgroup);
  }

  /// All query blocks of all heads of the group. Blocks on the mask's edges need a mask, and so do all blocks
  /// of a tile that the sequence's end cuts; the others go without.
  TANDEM_DEVICE void blocks(const BackwardTile& t, float (&dk)[C.tiling.head_dim_qk / 2],
                            float (&dv)[C.tiling.head_dim_v / 2]) {
    if constexpr (C.schedule.pingpong) return blocks_pingpong(t, dk, dv);
    for (int g = 0; g < group; ++g) {
      this->begin_head(t, g);
      for (int i = this->visits(t).first(); i < this->visits(t).end(); ++i) {
        const int m = this->begin_visit(t, i);
        if (one_step || this->needs_mask(t, m)) {
          step<true>(t, m, dk, dv);
        } else {
          step<false>(t, m, dk, dv);
        }
      }
    }
  }
  TANDEM_DEVICE void blocks_pingpong(const BackwardTile& t, float (&dk)[C.tiling.head_dim_qk / 2],
                                     float (&dv)[C.tiling.head_dim_v / 2]) {
    u32 p_packed[scores / 2];
    u32 ds_packed[scores / 2];
    int g = 0;
    this->begin_head(t, 0);
    if constexpr (C.functions.block_lists) {  // the lists of some heads may be empty
      while (this->visits(t).end() == 0) this->begin_head(t, ++g);
    }
    const int first = C.schedule.turned ? t.blocks.end - 1 : this->begin_visit(t, this->visits(t).first());
    step_pingpong<true, Follows::nothing>(t, first, p_packed, ds_packed, dk, dv);
    other_blocks(t, g, p_packed, ds_packed, dk, dv);
    finish_pingpong(p_packed, ds_packed, dk, dv);
  }
  /// All but the first, which is of head `begun` of the group.
  TANDEM_DEVICE void other_blocks(const BackwardTile& t, int begun, u32 (&p_packed)[scores / 2],
                                  u32 (&ds_packed)[scores / 2], float (&dk)[C.tiling.head_dim_qk / 2],
                                  float (&dv)[C.tiling.head_dim_v / 2]) {
    const auto step = [&](int m, bool last) {
      if (this->needs_mask(t, m)) {
        step_pingpong<true, Follows::block>(t, m, p_packed, ds_packed, dk, dv, last);
      } else {
        step_pingpong<false, Follows::block>(t, m, p_packed, ds_packed, dk, dv, last);
      }
    };
    if constexpr (C.schedule.turned) {
      for (int m = t.blocks.end - 1; m >= t.blocks.first; --m) {
        for (int g = m == t.blocks.end - 1 ? 1 : 0; g < group; ++g) step(m, false);
      }
      return;
    }
    for (int g = begun; g < group; ++g) {
      this->begin_head(t, g);
      const int end = this->visits(t).end();
      for (int i = this->visits(t).first() + (g == begun ? 1 : 0); i < end; ++i)
        step(this->begin_visit(t, i), overlaps && g == group - 1 && i == end - 1);
    }
  }

  /// All tiles, whose ping-pong goes on from tile to tile.
  TANDEM_DEVICE void run_overlapping() {
    float dk[C.tiling.head_dim_qk / 2];
    float dv[C.tiling.head_dim_v / 2];
    u32 p_packed[scores / 2];
    u32 ds_packed[scores / 2];
    BackwardTile t;
    bool follows_tile = false;
    this->k_at = Base::before_first;
    bool more = this->next_tile(t);
    while (more) {
      this->k_at.advance();
      this->anew().begin_keys_of_warp(t);
      const bool goes_on = overlaps_next<C>(t, group);
      if (follows_tile) {
        this->late = 2 - warpgroup;
        step_pingpong<true, Follows::tile>(t, t.blocks.first, p_packed, ds_packed, dk, dv, !goes_on);
      } else {
        tile::set_zero(dk);
        tile::set_zero(dv);
        step_pingpong<true, Follows::nothing>(t, t.blocks.first, p_packed, ds_packed, dk, dv, !goes_on);
      }
      other_blocks(t, 0, p_packed, ds_packed, dk, dv);
      if (goes_on) more = this->next_tile(t);
      follows_tile = goes_on && more;
      if (follows_tile) continue;
      finish_pingpong(p_packed, ds_packed, dk, dv);
      this->anew().store_tile(this->k_at.stage, dk, dv);
      this->release_k(this->k_at.stage);
      if (!goes_on) more = this->next_tile(t);
    }
  }

  TANDEM_DEVICE void run() {
    if constexpr (C.schedule.pingpong) {
      // The first dQ of the first warpgroup belongs to no block and is dropped. Its dS must still be
      // initialised.
      shared.scores[1].zero_rows(0, warpgroup * warpgroup_size + thread, threads);
      this->join();
      if (warpgroup == 1) pingpong_pass(warpgroup);
    }
    if constexpr (overlaps) {
      run_overlapping();
    } else {
      run_singly();
    }
    this->dq_buffer().await();  // the dQ writer's last arrival
  }
  /// All tiles, one after the other.
  TANDEM_DEVICE void run_singly() {
    BackwardTiles<C> tiles(p);
    BackwardTile t;
    while (tiles.next(t)) {
      float dk[C.tiling.head_dim_qk / 2];
      float dv[C.tiling.head_dim_v / 2];
      tile::set_zero(dk);
      tile::set_zero(dv);
      if (has_visits<C>(p, t)) {
        this->begin_tile(t);
        blocks(t, dk, dv);
        this->end_tile();
      }
      this->store_keys(t, dk);
      this->store_values(t, dv);
    }
  }
};

// ---- Entry ----

template <BackwardConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), 1) backward(const __grid_constant__ BackwardKernelParams<C> p) {
  static_assert((sizeof(BackwardShared<C>) + 1023) / 1024 * 1024 == backward_shared_bytes(C));
  auto& shared = *reinterpret_cast<BackwardShared<C>*>(ptx::dynamic_shared());
  const int warp = ptx::warp_index();
  if (ptx::thread_index() == 0) {
    shared.k_ring.init(C.consumers * 4);
    shared.v_ring.init(C.consumers * 4);
    shared.q_ring.init(C.consumers * 4);
    shared.dout_ring.init(C.consumers * 4);
    ptx::mbarrier_init(shared.ds_full, 1);
    ptx::mbarrier_init(shared.ds_empty, C.consumers * 4);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_blocks<C.cluster>();

  if (warp < 4) {
    ptx::release_registers<C.registers().producer>();
    if (warp == 0) {
      BackwardLoader<C>(p, shared).run();
    } else if (warp <= C.consumers) {
      DqWriter<C, BackwardShared<C>>{p, shared, warp - 1}.run();
    } else if constexpr (C.schedule.overlaps_tiles) {
      store_unseen_keys<C>(p, shared);
    }
  } else {
    ptx::claim_registers<C.registers().consumer>();
    using Consumer = typename Select<C.owns_keys(), NarrowBackwardConsumer<C>, WideBackwardConsumer<C>>::type;
    Consumer(p, shared, warp / 4 - 1, static_cast<int>(ptx::thread_index()) % warpgroup_size).run();
  }
  // The other CTA may still send dS or arrive at barriers. In a dQ writer's warp one lane comes later.
  if constexpr (C.cluster > 1) {
    ptx::sync_warp();
    ptx::sync_cluster();
  }
}

}  // namespace tandem
