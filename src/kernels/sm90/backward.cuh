// The backward pass: dQ, dK and dV from dO, with the scores computed again. One persistent block an SM.
//
// A block owns a tile of keys (two of a cluster share one): K and V stay in shared memory, dK and dV in
// registers, and the query blocks that see the tile pass by, for every query head of the group. Per query
// block:
//
//   S^T = K Q^T      P^T = 2^(scale log2(e) S^T - LSE)      dV += P^T dO
//   dP^T = V dO^T    dS^T = P^T (dP^T - delta)              dK += dS^T Q      dQ = dS K
//
// Scores are computed transposed, so that P^T and dS^T lie in registers as the products for dV and dK want
// their first operand. A producer warp feeds Q and dO; further warps of its warpgroup add dQ to f32 sums in
// global memory through TMA. Method: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608),
// section 3 and appendix B. Two warpgroups that own keys may take turns at the tensor cores (ping-pong).
// docs/kernels/backward.md has the arithmetic.
#pragma once

#include "kernels/config/backward.hpp"
#include "kernels/ptx/barrier.cuh"
#include "kernels/ptx/registers.cuh"
#include "kernels/sm90/backward_roles.cuh"
#include "kernels/tile/store_rows.cuh"

namespace tandem {

// ---- Consumer ----

/// Query block m: its products and its arithmetic, one behind the other.
template <BackwardConfig C>
template <bool masked>
TANDEM_DEVICE void BackwardConsumer<C>::step(const BackwardTile& t, int m, float (&dk)[C.head_dim_qk / 2],
                                             float (&dv)[C.head_dim_v / 2]) {
  float s[scores];
  float dp[scores];
  float dq[C.dq_columns() / 2];
  u32 p_packed[scores / 2];
  u32 p_sloped[slopes];
  u32 ds_packed[scores / 2];
  auto& ds_tile = shared.scores[score_at.stage];

  begin(t, m, s);
  shared.dout_ring.wait(dout_at);
  issue_scores<C.head_dim_v>(dp, v(), shared.dout[dout_at.stage]);
  ptx::wgmma_wait<1>();
  ptx::pin_registers(s);
  probabilities<masked>(t, m, s, p_packed, p_sloped);
  ptx::wgmma_fence();
  issue_gradient<C.head_dim_v>(dv, p_packed, shared.dout[dout_at.stage]);
  ptx::wgmma_wait<1>();
  ptx::pin_registers(dp);
  score_gradients(ds_packed, p_packed, p_sloped, dp);
  store_scores(ds_tile, ds_packed);
  ptx::wgmma_fence();
  issue_gradient<C.head_dim_qk>(dk, ds_packed, shared.q[q_at.stage]);
  join();
  ptx::wgmma_fence();
  issue_dq(dq, ds_tile);
  ptx::wgmma_wait<2>();
  ptx::pin_registers(dv);
  release_dout();
  ptx::wgmma_wait<1>();
  ptx::pin_registers(dk);
  release_q();
  ptx::wgmma_wait<0>();
  ptx::pin_registers(dq);
  store_dq(dq);
  score_at.advance();
}

/// As step, in turn with the other warpgroup (pingpong): the products of a turn, one behind the other, are a
/// dQ, dV and dK of the query block before, and the scores of block m. The arithmetic of block m follows,
/// under the other warpgroup's products. Its dS is in shared memory when this warpgroup has its next turn and
/// the other the one after: so the first warpgroup's dQ is of two blocks ago, the second's of one.
template <BackwardConfig C>
template <bool masked, bool first>
TANDEM_DEVICE void BackwardConsumer<C>::step_pingpong(const BackwardTile& t, int m,
                                                      u32 (&p_packed)[scores / 2],
                                                      u32 (&ds_packed)[scores / 2],
                                                      float (&dk)[C.head_dim_qk / 2],
                                                      float (&dv)[C.head_dim_v / 2]) {
  float s[scores];
  float dp[scores];
  auto q_to = q_at;
  auto dout_to = dout_at;
  if constexpr (!first) {
    q_to.advance();
    dout_to.advance();
  }
  shared.q_ring.wait(q_to);
  clear_unseeing_queries(t, m, q_to, dout_to);
  pingpong_wait();
  ptx::wgmma_fence();
  if constexpr (!first) {
    float dq[C.dq_columns() / 2];
    issue_dq(dq, shared.scores[score_at.stage ^ warpgroup]);
    issue_gradient<C.head_dim_v>(dv, p_packed, shared.dout[dout_at.stage]);
    ptx::wgmma_wait<1>();
    ptx::pin_registers(dq);
    ptx::wgmma_fence();
    issue_gradient<C.head_dim_qk>(dk, ds_packed, shared.q[q_at.stage], [&](int i) {
      constexpr int steps = C.block_m / 16;
      if (i == 0) await_dq_buffer();
      store_dq(dq, 0, i * dq_units / steps, (i + 1) * dq_units / steps);
    });
    ptx::wgmma_wait<0>();
    ptx::pin_registers(dv);
    ptx::pin_registers(dk);
    ptx::wgmma_fence();
  }
  issue_scores<C.head_dim_qk>(s, k(), shared.q[q_to.stage]);
  shared.dout_ring.wait(dout_to);
  issue_scores<C.head_dim_v>(dp, v(), shared.dout[dout_to.stage]);
  pingpong_pass();
  if constexpr (!first) {
    hand_over_dq();
    release_dout();
    release_q();
  }
  ptx::wgmma_wait<1>();
  ptx::pin_registers(s);
  u32 p_sloped[slopes];
  probabilities<masked>(t, m, s, p_packed, p_sloped);
  ptx::wgmma_wait<0>();
  ptx::pin_registers(dp);
  score_gradients(ds_packed, p_packed, p_sloped, dp);
  store_scores(shared.scores[score_at.stage], ds_packed);
  ptx::fence_async_shared();
  score_at.advance();
}

/// The last block's dV and dK, and the dQ that is left: two turns.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::finish_pingpong(const u32 (&p_packed)[scores / 2],
                                                        const u32 (&ds_packed)[scores / 2],
                                                        float (&dk)[C.head_dim_qk / 2],
                                                        float (&dv)[C.head_dim_v / 2]) {
  float dq[C.dq_columns() / 2];
  pingpong_wait();
  ptx::wgmma_fence();
  issue_gradient<C.head_dim_v>(dv, p_packed, shared.dout[dout_at.stage]);
  issue_gradient<C.head_dim_qk>(dk, ds_packed, shared.q[q_at.stage]);
  ptx::wgmma_wait<0>();
  ptx::pin_registers(dv);
  ptx::pin_registers(dk);
  ptx::wgmma_fence();
  issue_dq(dq, shared.scores[score_at.stage ^ warpgroup]);
  pingpong_pass();
  ptx::wgmma_wait<0>();
  ptx::pin_registers(dq);
  release_dout();
  release_q();
  store_dq(dq);
  pingpong_wait();
  if (warpgroup == 0) {
    ptx::wgmma_fence();
    issue_dq(dq, shared.scores[score_at.stage ^ 1]);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(dq);
    store_dq(dq);
  }
  pingpong_pass();
}

/// All query blocks of all heads of the group. Blocks on the mask's edges, and all blocks of a tile that the
/// sequence's end cuts, need a mask; the others go without.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::blocks(const BackwardTile& t, float (&dk)[C.head_dim_qk / 2],
                                               float (&dv)[C.head_dim_v / 2]) {
  if constexpr (C.pingpong) {
    u32 p_packed[scores / 2];
    u32 ds_packed[scores / 2];
    step_pingpong<true, true>(t, t.blocks.first, p_packed, ds_packed, dk, dv);
    for (int g = 0; g < group; ++g) {
      for (int m = t.blocks.first + (g == 0 ? 1 : 0); m < t.blocks.end; ++m) {
        if (needs_mask(t, m)) {
          step_pingpong<true, false>(t, m, p_packed, ds_packed, dk, dv);
        } else {
          step_pingpong<false, false>(t, m, p_packed, ds_packed, dk, dv);
        }
      }
    }
    finish_pingpong(p_packed, ds_packed, dk, dv);
  } else {
    for (int g = 0; g < group; ++g) {
      for (int m = t.blocks.first; m < t.blocks.end; ++m) {
        if (needs_mask(t, m)) {
          step<true>(t, m, dk, dv);
        } else {
          step<false>(t, m, dk, dv);
        }
      }
    }
  }
}

/// Waits for a tile's K and V, and clears what must not be multiplied.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::begin_tile(const BackwardTile& t) {
  shared.k_ring.wait(k_at);
  if constexpr (hides) clear_poisoned_keys();
  shared.v_ring.wait(v_at);
  if constexpr (C.varlen) {
    if ((t.n + 1) * C.tile_keys() > t.visible.seqlen_k) clear_key_tail(t);
  }
}

template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::end_tile() {
  if (thread % warp_size == 0) {
    shared.k_ring.release(k_at);
    shared.v_ring.release(v_at);
  }
  k_at.advance();
  v_at.advance();
}

template <BackwardConfig C>
template <int n>
TANDEM_DEVICE void BackwardConsumer<C>::store_keys(const BackwardTile& t, const float (&dk)[n]) {
  const int batch = p.packed_k ? 0 : t.batch;
  const tile::RowTarget rows{static_cast<u16*>(p.dk) + batch * p.dk_stride.batch +
                                 t.head_kv * p.dk_stride.head + static_cast<i64>(t.begin_k) * p.dk_stride.row,
                             p.dk_stride.row, p.head_dim_qk, p.dk_vectors};
  tile::store_rows<C.element>(rows, dk, p.scale, t.first_key + key_at(), 0, t.visible.seqlen_k, t.end_k,
                              thread);
}

template <BackwardConfig C>
template <int n>
TANDEM_DEVICE void BackwardConsumer<C>::store_values(const BackwardTile& t, const float (&dv)[n]) {
  const int batch = p.packed_k ? 0 : t.batch;
  const tile::RowTarget rows{static_cast<u16*>(p.dv) + batch * p.dv_stride.batch +
                                 t.head_kv * p.dv_stride.head + static_cast<i64>(t.begin_k) * p.dv_stride.row,
                             p.dv_stride.row, p.head_dim_v, p.dv_vectors};
  tile::store_rows<C.element>(rows, dv, 1.0F, t.first_key + key_at(), 0, t.visible.seqlen_k, t.end_k, thread);
}

template <int n>
TANDEM_DEVICE void set_zero(float (&d)[n]) {
#pragma unroll
  for (float& x : d) x = 0.0F;
}

template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::run() {
  if constexpr (C.owns_keys()) {
    BackwardTiles<C> tiles(p);
    BackwardTile t;
    if constexpr (C.pingpong) {
      // The first warpgroup's first dQ is of no block, and dropped; still it is made from written memory.
      shared.scores[1].zero_rows(0, warpgroup * warpgroup_size + thread, threads);
      join();
      if (warpgroup == 1) pingpong_pass();
    }
    while (tiles.next(t)) {
      float dk[C.head_dim_qk / 2];
      float dv[C.head_dim_v / 2];
      set_zero(dk);
      set_zero(dv);
      if (t.blocks.first < t.blocks.end) {
        begin_tile(t);
        blocks(t, dk, dv);
        end_tile();
      }
      store_keys(t, dk);
      store_values(t, dv);
    }
  } else if (warpgroup == 0) {
    run_role<false>();
  } else {
    run_role<true>();
  }
  ptx::named_barrier_sync(barrier_dq_empty + warpgroup, dq_threads);  // the adder's last word
}

/// The tiles of a warpgroup that makes dK (`keys`) or dV.
template <BackwardConfig C>
template <bool keys>
TANDEM_DEVICE void BackwardConsumer<C>::run_role() {
  BackwardTiles<C> tiles(p);
  BackwardTile t;
  while (tiles.next(t)) {
    float d[(keys ? C.head_dim_qk : C.head_dim_v) / 2];
    set_zero(d);
    if (t.blocks.first < t.blocks.end) {
      begin_tile(t);
      role_blocks<keys>(t, d);
      end_tile();
    }
    if constexpr (keys) {
      store_keys(t, d);
    } else {
      store_values(t, d);
    }
  }
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
    ptx::mbarrier_init(shared.ds_full, 1);
    ptx::mbarrier_init(shared.ds_empty, C.consumers * 4);
    ptx::fence_mbarrier_init();
  }
  if constexpr (C.cluster > 1) {
    ptx::sync_cluster();
  } else {
    ptx::sync_block();
  }

  if (warp < 4) {
    ptx::release_registers<C.registers().producer>();
    if (warp == 0) {
      BackwardLoader<C>(p, shared).run();
    } else if (warp <= C.consumers) {
      DqWriter<C>{p, shared, warp - 1}.run();
    }
  } else {
    ptx::claim_registers<C.registers().consumer>();
    BackwardConsumer<C>(p, shared, warp / 4 - 1, static_cast<int>(ptx::thread_index()) % warpgroup_size)
        .run();
  }
  // The other block may still have dS to send, or barriers to arrive at. Of an adder one lane comes later.
  if constexpr (C.cluster > 1) {
    ptx::sync_warp();
    ptx::sync_cluster();
  }
}

}  // namespace tandem
