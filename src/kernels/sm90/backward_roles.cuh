// The wide heads of the backward pass: a tile of 64 keys, and a product each for the two warpgroups.
//
// Warpgroup 0: S^T = K Q^T; P^T, kept in registers and handed over; dV += P^T dO; half of dQ = dS K.
// Warpgroup 1: dP^T = V dO^T; dS^T = P^T (dP^T - delta); dK += dS^T Q; the other half of dQ.
//
// Two blocks of a cluster send each other dS. Each then makes half of dQ's columns over the keys of both, a
// warpgroup a quarter.
//
// 64 queries a product read 4 KB of operands in 32 cycles, where 32 queries a warpgroup read 3 KB in 16; dV
// and dK take their first operand from registers. One's exponentials run under the other's products, without
// a barrier for both: P and dS each have one buffer, and what hands the one on says that the other has been
// read.
#pragma once

#include "kernels/sm90/backward_consumer.cuh"

namespace tandem {

/// P^T in the order in which threads hold it, from warpgroup 0 to 1.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::hand_over(const u32 (&packed)[scores / 2]) {
  auto* at = reinterpret_cast<ptx::Vec4*>(shared.scores[1].data) + thread;
#pragma unroll
  for (int i = 0; i < scores / 8; ++i) {
    const u32* of = packed + 4 * i;
    ptx::store_shared(at + i * warpgroup_size, ptx::Vec4{of[0], of[1], of[2], of[3]});
  }
  ptx::named_barrier_arrive(barrier_p_full, threads);
}

template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::take_over(u32 (&packed)[scores / 2]) {
  ptx::named_barrier_sync(barrier_p_full, threads);
  const auto* at = reinterpret_cast<const ptx::Vec4*>(shared.scores[1].data) + thread;
#pragma unroll
  for (int i = 0; i < scores / 8; ++i) {
    const ptx::Vec4 of = ptx::load_shared(at + i * warpgroup_size);
    packed[4 * i] = of.x;
    packed[4 * i + 1] = of.y;
    packed[4 * i + 2] = of.z;
    packed[4 * i + 3] = of.w;
  }
}

/// Sends dS, which warpgroup 1 has written, to the other block of the cluster, whose buffer is free.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::send_ds() {
  ptx::named_barrier_sync(barrier_ds_own, warpgroup_size);
  if (thread == 0) {
    ptx::mbarrier_arrive_expect(shared.ds_full, Shared::ScoreTile::bytes);
    ptx::bulk_send(shared.scores[2].data, shared.scores[0].data, Shared::ScoreTile::bytes, shared.ds_full);
  }
}

/// This warpgroup's half of dQ, whose dS is there. Its last part leaves under the product that `begin`
/// issues, and `x` is that product's result.
template <BackwardConfig C>
template <typename Begin>
TANDEM_DEVICE void BackwardConsumer<C>::make_dq(float (&x)[scores], Begin begin) {
  float dq[C.dq_columns() / 2];
  ptx::wgmma_fence();
  issue_dq(dq, shared.scores[0]);
  if constexpr (C.cluster > 1) {
    ptx::mbarrier_wait_other(shared.ds_full, exchange);
    issue_dq<true>(dq, shared.scores[2], other_k(), dq_column_at());
  }
  ptx::wgmma_wait<0>();
  ptx::pin_registers(dq);
  if constexpr (C.cluster > 1) {
    if (thread % warp_size == 0) ptx::mbarrier_arrive_other(shared.ds_empty);
    exchange ^= 1;
  }
#pragma unroll
  for (int part = 0; part < C.dq_parts - 1; ++part) store_dq(dq, part);
  begin();
  store_dq(dq, C.dq_parts - 1);
  ptx::wgmma_wait<0>();
  ptx::pin_registers(x);
}

/// Warpgroup 0's part of query block m, whose S is there; makes the next one's. P's buffer is free: dS of the
/// block before has been waited for, which was made from it.
template <BackwardConfig C>
template <bool masked>
TANDEM_DEVICE void BackwardConsumer<C>::probabilities_step(const BackwardTile& t, int m, int next,
                                                           float (&s)[scores],
                                                           float (&dv)[C.head_dim_v / 2]) {
  u32 packed[scores / 2];
  {
    u32 sloped[slopes];
    probabilities<masked>(t, m, s, packed, sloped);
    if constexpr (C.softcap) {
      hand_over(sloped);
    } else {
      hand_over(packed);
    }
  }
  ptx::sync_warp();  // all lanes have read LSE
  release_q();
  shared.dout_ring.wait(dout_at);
  ptx::wgmma_fence();
  issue_gradient<C.head_dim_v>(dv, packed, shared.dout[dout_at.stage]);
  ptx::wgmma_wait<0>();
  ptx::pin_registers(dv);
  release_dout();
  ptx::named_barrier_sync(barrier_ds_full, threads);
  make_dq(s, [&] { begin(t, next, s); });
}

/// Waits for query block m's dO, and issues dP.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::begin_gradients(const BackwardTile& t, int m, float (&dp)[scores]) {
  shared.dout_ring.wait(dout_at);
  clear_unseeing_queries(t, m, q_at, dout_at);
  ptx::wgmma_fence();
  issue_scores<C.head_dim_v>(dp, v(), shared.dout[dout_at.stage]);
}

/// Warpgroup 1's part, whose dP is there. dS has been read: both warpgroups' dQ of the block before were
/// waited for before P was handed over.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::gradients_step(const BackwardTile& t, int next, float (&dp)[scores],
                                                       float (&dk)[C.head_dim_qk / 2]) {
  u32 ds_packed[scores / 2];
  {
    u32 p_packed[scores / 2];
    take_over(p_packed);
    score_gradients(ds_packed, p_packed, dp);
  }
  if constexpr (C.cluster > 1) ptx::mbarrier_wait_other(shared.ds_empty, exchange ^ 1);
  store_scores(shared.scores[0], ds_packed);
  ptx::fence_async_shared();
  ptx::named_barrier_arrive(barrier_ds_full, threads);
  if constexpr (C.cluster > 1) send_ds();
  ptx::sync_warp();  // all lanes have read delta
  release_dout();
  shared.q_ring.wait(q_at);
  ptx::wgmma_fence();
  issue_gradient<C.head_dim_qk>(dk, ds_packed, shared.q[q_at.stage]);
  ptx::wgmma_wait<0>();
  ptx::pin_registers(dk);
  release_q();
  if constexpr (C.cluster == 1) ptx::named_barrier_sync(barrier_ds_own, warpgroup_size);
  make_dq(dp, [&] { begin_gradients(t, next, dp); });
}

/// A tile of a warpgroup: `d` is its dV or dK. After the last block one more product is made, which is not
/// used, so that no branch stands between products.
template <BackwardConfig C>
template <bool keys, int n>
TANDEM_DEVICE void BackwardConsumer<C>::role_blocks(const BackwardTile& t, float (&d)[n]) {
  float x[scores];
  if constexpr (keys) {
    begin_gradients(t, t.blocks.first, x);
  } else {
    begin(t, t.blocks.first, x);
  }
  ptx::wgmma_wait<0>();
  ptx::pin_registers(x);
  for (int g = 0; g < group; ++g) {
    for (int m = t.blocks.first; m < t.blocks.end; ++m) {
      const int next = next_block(t, g, m);
      if constexpr (keys) {
        gradients_step(t, next, x, d);
      } else if (needs_mask(t, m)) {
        probabilities_step<true>(t, m, next, x, d);
      } else {
        probabilities_step<false>(t, m, next, x, d);
      }
    }
  }
  shared.q_ring.wait(q_at);
  shared.dout_ring.wait(dout_at);
  ptx::sync_warp();  // all lanes have seen the phases that a release may end
  release_q();
  release_dout();
}

}  // namespace tandem
