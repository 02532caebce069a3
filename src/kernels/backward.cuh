// The backward pass: dQ, dK and dV from dO, with the scores computed again. One persistent block an SM.
//
// A block owns a tile of keys: K and V stay in shared memory, dK and dV in registers, and the query blocks
// that see the tile pass by, for every query head of the group. Per query block:
//
//   S^T = K Q^T      P^T = 2^(scale log2(e) S^T - LSE)      dV += P^T dO
//   dP^T = V dO^T    dS^T = P^T (dP^T - delta)              dK += dS^T Q      dQ = dS K
//
// Scores are computed transposed, so that P^T and dS^T lie in registers as the products for dV and dK want
// their first operand. A producer warp feeds Q and dO; further warps of its warpgroup add dQ to f32 sums in
// global memory through the copy engine. Method: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608),
// section 3 and appendix B. docs/kernels/backward.md has the arithmetic.
#pragma once

#include "kernels/backward_consumer.cuh"
#include "kernels/config.hpp"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/registers.cuh"
#include "kernels/tile/store_rows.cuh"

namespace tandem {

// ---- Consumer ----

/// Query block m of head g of the group. With scores_ahead its S is there, and the next one's is made here:
/// of a block that is not used after the last, so that no branch stands between products (C7512, C7514).
template <BackwardConfig C>
template <bool masked>
TANDEM_DEVICE void BackwardConsumer<C>::step(const BackwardTile& t, int g, int m, float (&s)[scores],
                                             float (&dk)[C.columns_k() / 2], float (&dv)[C.columns_v() / 2]) {
  float dp[scores];
  float dq[C.dq_columns() / 2];
  u32 p_packed[scores / 2];
  u32 p_sloped[slopes];
  u32 ds_packed[scores / 2];
  auto& ds_tile = shared.scores[score_at];
  auto& p_tile = shared.scores[C.owns_keys() ? score_at : 2 + score_at];  // not used where registers feed P

  if constexpr (!C.scores_ahead) begin(t, m, s);
  shared.dout_ring.wait(dout_at);
  if constexpr (C.scores_ahead) ptx::wgmma_fence();
  issue_scores<C.head_dim_v>(dp, v(), shared.dout[dout_at.stage]);

  if constexpr (!C.scores_ahead) {
    ptx::wgmma_wait<1>();
    ptx::pin_registers(s);
  }
  probabilities<masked>(s, p_packed, p_sloped, t, m);
  if constexpr (C.owns_keys()) {
    ptx::wgmma_fence();
    issue_gradient<C.columns_v()>(dv, p_packed, p_tile, shared.dout[dout_at.stage]);
    ptx::wgmma_wait<1>();
  } else {
    store_scores(p_tile, p_packed);
    ptx::wgmma_wait<0>();
  }
  ptx::pin_registers(dp);
  if constexpr (C.softcap) {
    score_gradients(ds_packed, p_sloped, dp);
  } else {
    score_gradients(ds_packed, p_packed, dp);
  }
  store_scores(ds_tile, ds_packed);
  if constexpr (C.owns_keys()) {
    ptx::wgmma_fence();
    issue_gradient<C.columns_k()>(dk, ds_packed, ds_tile, shared.q[q_at.stage]);
    join();
  } else {
    join();
    ptx::wgmma_fence();
    issue_gradient<C.columns_v()>(dv, p_packed, p_tile, shared.dout[dout_at.stage]);
    issue_gradient<C.columns_k()>(dk, ds_packed, ds_tile, shared.q[q_at.stage]);
  }
  ptx::wgmma_fence();
  issue_dq(dq, ds_tile);
  ptx::wgmma_wait<2>();
  ptx::pin_registers(dv);
  release_dout();
  ptx::wgmma_wait<1>();
  ptx::pin_registers(dk);
  release_q();
  if constexpr (C.scores_ahead) {
    const int after = g + 1 < group ? t.blocks.first : t.blocks.end;
    begin(t, m + 1 < t.blocks.end ? m + 1 : after, s);
    ptx::wgmma_wait<1>();
  } else {
    ptx::wgmma_wait<0>();
  }
  ptx::pin_registers(dq);
  store_dq(dq);
  if constexpr (C.scores_ahead) {
    ptx::wgmma_wait<0>();
    ptx::pin_registers(s);
  }
  score_at ^= 1;
}

/// All query blocks of all heads of the group. Blocks on the mask's edges, and all blocks of a tile that the
/// sequence's end cuts, need a mask; the others go without.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::blocks(const BackwardTile& t, float (&dk)[C.columns_k() / 2],
                                               float (&dv)[C.columns_v() / 2]) {
  float s[scores];
  if constexpr (C.scores_ahead) {
    begin(t, t.blocks.first, s);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(s);
  }
  for (int g = 0; g < group; ++g) {
    for (int m = t.blocks.first; m < t.blocks.end; ++m) {
      if (m < t.blocks.inner_first || (C.local && m >= t.blocks.inner_end)) {
        step<true>(t, g, m, s, dk, dv);
      } else {
        step<false>(t, g, m, s, dk, dv);
      }
    }
  }
  if constexpr (C.scores_ahead) release_q();
}

/// One tile.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::compute(const BackwardTile& t, float (&dk)[C.columns_k() / 2],
                                                float (&dv)[C.columns_v() / 2]) {
  shared.k_ring.wait(k_at);
  if constexpr (hides) clear_poisoned_keys();
  shared.v_ring.wait(v_at);
  if constexpr (C.ragged) {
    const int valid = t.visible.seqlen_k - t.n * C.block_n;
    if (valid < C.block_n) clear_key_tail(valid);
  }
  blocks(t, dk, dv);
  if (thread % warp_size == 0) {
    shared.k_ring.release(k_at);
    shared.v_ring.release(v_at);
  }
  k_at.advance();
  v_at.advance();
}

template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::run() {
  BackwardTiles<C> tiles(p);
  BackwardTile t;
  while (tiles.next(t)) {
    float dk[C.columns_k() / 2];
    float dv[C.columns_v() / 2];
#pragma unroll
    for (float& x : dk) x = 0.0F;
#pragma unroll
    for (float& x : dv) x = 0.0F;
    if (t.blocks.first < t.blocks.end) compute(t, dk, dv);

    const i64 row = t.begin_k;
    const int batch = p.packed_k ? 0 : t.batch;
    const int first = t.n * C.block_n + key_at();
    const tile::RowTarget dk_rows{static_cast<u16*>(p.dk) + batch * p.dk_stride.batch +
                                      t.head_kv * p.dk_stride.head + row * p.dk_stride.row,
                                  p.dk_stride.row, p.head_dim_qk, p.dk_vectors};
    const tile::RowTarget dv_rows{static_cast<u16*>(p.dv) + batch * p.dv_stride.batch +
                                      t.head_kv * p.dv_stride.head + row * p.dv_stride.row,
                                  p.dv_stride.row, p.head_dim_v, p.dv_vectors};
    tile::store_rows<C.element>(dk_rows, dk, p.scale, first, column_at<C.columns_k()>(), t.visible.seqlen_k,
                                t.end_k, thread);
    tile::store_rows<C.element>(dv_rows, dv, 1.0F, first, column_at<C.columns_v()>(), t.visible.seqlen_k,
                                t.end_k, thread);
  }
  ptx::named_barrier_sync(barrier_dq_empty + warpgroup, dq_threads);  // the adder's last word
}

// ---- Entry ----

template <BackwardConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), 1) backward(const __grid_constant__ BackwardParams p) {
  static_assert((sizeof(BackwardShared<C>) + 1023) / 1024 * 1024 == backward_shared_bytes(C));
  auto& shared = *reinterpret_cast<BackwardShared<C>*>(ptx::dynamic_shared());
  // Uniform over the warp, and the compiler is to know it.
  const int warp = static_cast<int>(ptx::shuffle(ptx::thread_index() / warp_size, 0));
  if (ptx::thread_index() == 0) {
    shared.k_ring.init(C.consumers * 4);
    shared.v_ring.init(C.consumers * 4);
    shared.q_ring.init(C.consumers * 4);
    shared.dout_ring.init(C.consumers * 4);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_block();

  if (warp < 4) {
    ptx::release_registers<C.registers().producer>();
    if (warp == 0) {
      BackwardLoader<C>(p, shared).run();
    } else if (warp <= C.consumers) {
      BackwardAdder<C>{p, shared, warp - 1}.run();
    }
  } else {
    ptx::claim_registers<C.registers().consumer>();
    BackwardConsumer<C>(p, shared, warp / 4 - 1, static_cast<int>(ptx::thread_index()) % warpgroup_size)
        .run();
  }
}

}  // namespace tandem
