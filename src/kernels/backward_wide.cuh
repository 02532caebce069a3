// The loop of wide heads with scores_ahead: the products that make dV, dK and dQ of one query block run while
// the next block's scores become P and dS.
//
// P and dS of the block whose products are due lie in shared memory; nothing is in flight from one step to
// the next (see docs/kernels/backward.md, on C7514).
#pragma once

#include "kernels/backward_consumer.cuh"

namespace tandem {

/// Waits for block m's Q and dO, and issues its S and dP.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::issue_all_scores(const BackwardTile& t, int m, float (&s)[scores],
                                                         float (&dp)[scores]) {
  begin(t, m, s);
  shared.dout_ring.wait(dout_at);
  issue_scores<C.head_dim_v>(dp, shared.v, shared.dout[dout_at.stage]);
}

/// Turns S and dP, issued before `behind` other products, into P and dS in shared memory.
template <BackwardConfig C>
template <bool masked, int behind>
TANDEM_DEVICE void BackwardConsumer<C>::finish_scores(const BackwardTile& t, int m, float (&s)[scores],
                                                      float (&dp)[scores]) {
  u32 packed[scores / 2];
  u32 sloped[slopes];
  ptx::wgmma_wait<behind + 1>();
  ptx::pin_registers(s);
  probabilities<masked>(s, packed, sloped, t, m);
  store_scores(shared.scores[2 + score_at], packed);
  ptx::wgmma_wait<behind>();
  ptx::pin_registers(dp);
  u32 ds[scores / 2];
  if constexpr (C.softcap) {
    score_gradients(ds, sloped, dp);
  } else {
    score_gradients(ds, packed, dp);
  }
  store_scores(shared.scores[score_at], ds);
}

/// dV += P^T dO and dK += dS^T Q of the block before the one whose scores are due.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::issue_gradients(float (&dk)[C.columns_k() / 2],
                                                        float (&dv)[C.columns_v() / 2]) {
  const u32 unused[scores / 2] = {};
  const int before = score_at ^ 1;
  issue_gradient<C.columns_v()>(dv, unused, shared.scores[2 + before], shared.dout[dout_at.before()]);
  issue_gradient<C.columns_k()>(dk, unused, shared.scores[before], shared.q[q_at.before()]);
}

/// dQ of the block before, once dV and dK are issued; gives its Q and dO back.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::finish_gradients(i64 block, float (&dk)[C.columns_k() / 2],
                                                         float (&dv)[C.columns_v() / 2]) {
  float dq[C.dq_columns() / 2];
  ptx::wgmma_fence();
  issue_dq(dq, shared.scores[score_at ^ 1]);
  ptx::wgmma_wait<2>();
  ptx::pin_registers(dv);
  if (thread % warp_size == 0) shared.dout_ring.release_stage(dout_at.before());
  ptx::wgmma_wait<1>();
  ptx::pin_registers(dk);
  if (thread % warp_size == 0) shared.q_ring.release_stage(q_at.before());
  ptx::wgmma_wait<0>();
  ptx::pin_registers(dq);
  store_dq(dq, block);
}

/// Scores of block m under the products of the one before, which is number `before` of the workspace.
template <BackwardConfig C>
template <bool masked>
TANDEM_DEVICE void BackwardConsumer<C>::overlapped_step(const BackwardTile& t, int m, i64 before,
                                                        float (&dk)[C.columns_k() / 2],
                                                        float (&dv)[C.columns_v() / 2]) {
  float s[scores];
  float dp[scores];
  issue_all_scores(t, m, s, dp);
  issue_gradients(dk, dv);
  finish_scores<masked, 2>(t, m, s, dp);
  finish_gradients(before, dk, dv);
  next_scores();
}

/// What the next step makes are the scores of the block after.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::next_scores() {
  join();
  q_at.advance();
  dout_at.advance();
  score_at ^= 1;
}

template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::overlapped_blocks(const BackwardTile& t,
                                                          float (&dk)[C.columns_k() / 2],
                                                          float (&dv)[C.columns_v() / 2]) {
  {
    float s[scores];
    float dp[scores];
    issue_all_scores(t, t.blocks.first, s, dp);
    finish_scores<true, 0>(t, t.blocks.first, s, dp);
    next_scores();
  }
  i64 before = workspace_block(p, t.head_kv * group, t.q_block + t.blocks.first);
  for (int g = 0; g < group; ++g) {
    for (int m = t.blocks.first + (g == 0 ? 1 : 0); m < t.blocks.end; ++m) {
      if (m < t.blocks.inner_first || (C.local && m >= t.blocks.inner_end)) {
        overlapped_step<true>(t, m, before, dk, dv);
      } else {
        overlapped_step<false>(t, m, before, dk, dv);
      }
      before = workspace_block(p, t.head_kv * group + g, t.q_block + m);
    }
  }
  ptx::wgmma_fence();
  issue_gradients(dk, dv);
  finish_gradients(before, dk, dv);
}

}  // namespace tandem
