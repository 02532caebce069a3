// The backward pass with all five products in 8 bits: S and dP of s8 values, dV, dK and dQ of e4m3 ones. It
// divides its work as the 16-bit kernel does (ops/backward/sm90/backward.cuh): a persistent CTA an SM, a tile
// of 128 keys at a time, two consumer warpgroups that alternate at the tensor cores.
//
// What P and dS are rounded by is known before: a power of two of each row, and scales of blocks, which are
// in the LSE, in delta, and in one factor of a block each. So dV and dK add up in the tensor cores over all
// blocks, and no largest value of a tile is looked for. Operands of 8 bits are K-major, so that Q, dO and K
// come transposed, too, in orders of rows in which S^T packs to operands without an exchange between lanes.
#pragma once

#include "ops/eight_bit_backward/sm90/eight_bit_backward_consumer.cuh"
#include "ptx/registers.cuh"

namespace tandem {

// ---- Consumer ----

template <EightBitBackwardConfig C>
struct EightBitBackwardSteps : EightBitBackwardConsumer<C> {
  using Base = EightBitBackwardConsumer<C>;
  using Base::Base;
  using Base::bytes;
  using Base::k_at;
  using Base::q_at;
  using Base::score_at;
  using Base::scores;
  using Base::shared;
  using Base::thread;
  using Base::threads;
  using Base::warpgroup;
  using Base::words;
  static constexpr int dim_qk = C.tiling.head_dim_qk;
  static constexpr int dim_v = C.tiling.head_dim_v;

  /// S and dP are in flight with dV and dK. Of 128 queries ptxas (NVRTC 13.0) has no registers for all, nor
  /// for S alone beside them, and would serialise the products (C7512).
  static constexpr bool scores_beside_gradients = C.tiling.block_m == 64;

  /// Waits for dV and dK of a block, not for the products of the `later` groups that were issued after them.
  template <int later>
  TANDEM_DEVICE void await_gradients(typename Base::QPosition at, float (&dk)[dim_qk / 2],
                                     float (&dv)[dim_v / 2]) {
    ptx::wgmma_wait<later>();
    ptx::pin_registers(dv);
    ptx::pin_registers(dk);
    this->release(at);
  }

  /// Query block m. When this warpgroup has the tensor cores, it issues dQ of the previous query block (the
  /// first warpgroup: of the one before), the scores of block m, dV and dK of the previous one, and dP of
  /// block m. The arithmetic of block m then runs under the other warpgroup's products. Who writes dS when is
  /// as in the 16-bit kernel.
  template <bool masked, bool first>
  TANDEM_DEVICE void step(const BackwardTile& t, int m, u32 (&p_packed)[words], u32 (&ds_packed)[words],
                          float (&dk)[dim_qk / 2], float (&dv)[dim_v / 2]) {
    i32 s[scores];
    i32 dp[scores];
    float p_of[scores];
    const auto before = q_at;
    if constexpr (!first) q_at.advance();
    shared.ring.wait(q_at);
    pingpong_wait(warpgroup);
    ptx::wgmma_fence();
    if constexpr (first) {
      this->template issue_scores<dim_qk>(s, shared.k, shared.q[q_at.stage]);
      this->template issue_scores<dim_v>(dp, shared.v, shared.dout[q_at.stage]);
      pingpong_pass(warpgroup);
      ptx::wgmma_wait<1>();
      ptx::pin_registers(s);
      this->template probabilities<masked>(t, m, s, p_of);
      this->pack(p_packed, p_of);
    } else {
      float dq[C.dq_columns() / 2];
      const auto issue_s = [&] { this->template issue_scores<dim_qk>(s, shared.k, shared.q[q_at.stage]); };
      this->issue_dq(dq, shared.scores[score_at.stage ^ warpgroup]);
      if constexpr (scores_beside_gradients) issue_s();
      this->template issue_gradient<dim_v>(dv, p_packed, shared.dout_t[before.stage]);
      ptx::wgmma_wait<scores_beside_gradients ? 2 : 1>();
      ptx::pin_registers(dq);
      ptx::wgmma_fence();
      this->template issue_gradient<dim_qk>(dk, ds_packed, shared.q_t[before.stage]);
      this->store_dq(dq);
      if constexpr (!scores_beside_gradients) {
        await_gradients<0>(before, dk, dv);
        ptx::wgmma_fence();
        issue_s();
      }
      ptx::wgmma_fence();
      this->template issue_scores<dim_v>(dp, shared.v, shared.dout[q_at.stage]);
      pingpong_pass(warpgroup);
      ptx::wgmma_wait<scores_beside_gradients ? 3 : 1>();
      ptx::pin_registers(s);
      this->template probabilities<masked>(t, m, s, p_of);
      if constexpr (scores_beside_gradients) await_gradients<1>(before, dk, dv);
      this->pack(p_packed, p_of);
    }
    ptx::wgmma_wait<0>();
    ptx::pin_registers(dp);
    this->score_gradients(p_of, dp);
    this->pack(ds_packed, p_of);
    this->store_scores(shared.scores[score_at.stage], ds_packed);
    ptx::fence_async_shared();
    score_at.advance();
  }

  /// dV and dK of the last block, and the dQ that is left. Takes the tensor cores twice.
  TANDEM_DEVICE void finish(const u32 (&p_packed)[words], const u32 (&ds_packed)[words],
                            float (&dk)[dim_qk / 2], float (&dv)[dim_v / 2]) {
    float dq[C.dq_columns() / 2];
    pingpong_wait(warpgroup);
    ptx::wgmma_fence();
    this->issue_dq(dq, shared.scores[score_at.stage ^ warpgroup]);
    this->template issue_gradient<dim_v>(dv, p_packed, shared.dout_t[q_at.stage]);
    this->template issue_gradient<dim_qk>(dk, ds_packed, shared.q_t[q_at.stage]);
    pingpong_pass(warpgroup);
    ptx::wgmma_wait<2>();
    ptx::pin_registers(dq);
    this->store_dq(dq);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(dv);
    ptx::pin_registers(dk);
    this->release(q_at);
    q_at.advance();
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

  /// All query blocks of all heads of the group.
  TANDEM_DEVICE void blocks(const BackwardTile& t, float (&dk)[dim_qk / 2], float (&dv)[dim_v / 2]) {
    u32 p_packed[words];
    u32 ds_packed[words];
    step<true, true>(t, t.blocks.first, p_packed, ds_packed, dk, dv);
    for (int g = 0; g < this->group; ++g) {
      for (int m = t.blocks.first + (g == 0 ? 1 : 0); m < t.blocks.end; ++m) {
        if (this->needs_mask(t, m)) {
          step<true, false>(t, m, p_packed, ds_packed, dk, dv);
        } else {
          step<false, false>(t, m, p_packed, ds_packed, dk, dv);
        }
      }
    }
    finish(p_packed, ds_packed, dk, dv);
  }

  TANDEM_DEVICE void run() {
    BackwardTiles<C> tiles(bytes);
    BackwardTile t;
    // The first dQ of the first warpgroup belongs to no block and is dropped. Its dS must still be
    // initialised.
    shared.scores[1].zero_rows(0, C.tiling.block_m, warpgroup * warpgroup_size + thread, threads);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(barrier_joined, threads);
    if (warpgroup == 1) pingpong_pass(warpgroup);
    ptx::wait_for_previous_grid();
    while (tiles.next(t)) {
      float dk[dim_qk / 2];
      float dv[dim_v / 2];
      tile::set_zero(dk);
      tile::set_zero(dv);
      const bool any = has_visits<C>(bytes, t);
      if (any) {
        this->set_scales(t);
        shared.keys_ring.wait(k_at);
        blocks(t, dk, dv);
        if (thread % warp_size == 0) shared.keys_ring.release(k_at);
        k_at.advance();
      }
      this->store_gradients(t, dk, dv, any);
    }
    this->dq_buffer().await();  // the dQ writer's last arrival
  }
};

// ---- Entry ----

template <EightBitBackwardConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), 1)
    eight_bit_backward(const __grid_constant__ EightBitBackwardParams p) {
  using Shared = EightBitBackwardShared<C>;
  static_assert((sizeof(Shared) + 1023) / 1024 * 1024 == backward_shared_bytes(C));
  auto& shared = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
  const int warp = ptx::warp_index();
  if (ptx::thread_index() == 0) {
    shared.keys_ring.init(C.consumers * 4);
    shared.ring.init(C.consumers * 4);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();

  if (warp < 4) {
    ptx::release_registers<C.registers().producer>();
    if (warp == 0) {
      EightBitBackwardLoader<C>(p, shared).run();
    } else if (warp <= C.consumers) {
      DqWriter<C, Shared>{p, shared, warp - 1}.run();
    }
  } else {
    ptx::claim_registers<C.registers().consumer>();
    EightBitBackwardSteps<C>(p, shared, warp / 4 - 1, static_cast<int>(ptx::thread_index()) % warpgroup_size)
        .run();
  }
}

}  // namespace tandem
