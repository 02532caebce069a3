// Rows of the tiles in shared memory that the consumers of the main backward kernel must not multiply. They
// are set to zero, since 0 * NaN is NaN.
#pragma once

#include "kernels/sm90/backward_consumer.cuh"

namespace tandem {

/// Clears rows of K and V past the sequence's end, which may hold anything.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::clear_key_tail(const BackwardTile& t) {
  const int among = warpgroup * warpgroup_size + thread;
  const auto valid = [&](int first_key) {
    return min(max(t.visible.seqlen_k - first_key, 0), C.tiling.block_n);
  };
  k().zero_rows(valid(t.first_key), among, threads);
  v().zero_rows(valid(t.first_key), among, threads);
  if constexpr (C.tiling.cluster > 1) {
    const int other = t.first_key + BackwardTiles<C>::other_keys();
    other_k().zero_rows(valid(other), among, threads);
  }
  join();
}
/// Sets the scale of the scores of the thread's key h. One of the four threads that have the key stores it.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::set_scale(int h, float value) {
  if (thread % 4 == 0 && (C.owns_keys() || warpgroup == 0))
    ptx::store_shared(shared.key_scale_log2 + key_at() + position.row(h), value);
}
/// Clears keys that are not finite. dQ = dS K multiplies a key by 0 for queries from which it is hidden. So a
/// row of K that is not finite becomes 0, and the scale of its scores becomes NaN, which reaches the queries
/// that see it. The search costs a read of the tile, during the loads of V and Q.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::clear_poisoned_keys() {
  const int among = warpgroup * warpgroup_size + thread;
  bool found = k().template any_nonfinite<C.tiling.element>(0, C.tiling.block_n, among, threads);
  if constexpr (C.tiling.cluster > 1)
    found |= other_k().template any_nonfinite<C.tiling.element>(0, C.tiling.block_n, among, threads);
#pragma unroll
  for (int h = 0; h < 2; ++h) set_scale(h, scale_log2);
  // Each warp stores a word. ptxas takes the result of reduce_or for uniform; otherwise it serialises the
  // products (warning C7520).
  const int lane = thread % warp_size;
  const u32 found_in_warp = ptx::reduce_or(found ? 1U : 0U);
  if (lane == 0)
    ptx::store_shared(shared.poisoned + (warpgroup * warpgroup_size + thread) / warp_size, found_in_warp);
  meet();
  if (ptx::reduce_or(lane < threads / warp_size ? ptx::load_shared(shared.poisoned + lane) : 0U) == 0) return;
  bool poisoned[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = key_at() + position.row(h);
    poisoned[h] = k().template any_nonfinite<C.tiling.element>(row, row + 1, 0, 1);
    if (poisoned[h]) set_scale(h, ptx::infinity() - ptx::infinity());
    // The other CTA computes the scores of its own keys. Here only this CTA's columns of such keys are
    // cleared.
    if constexpr (C.tiling.cluster > 1) {
      if (warpgroup == 1)
        poisoned[h] = other_k().template any_nonfinite<C.tiling.element>(row, row + 1, 0, 1);
    }
  }
  join();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = key_at() + position.row(h);
    if (poisoned[h] && (C.owns_keys() || warpgroup == 0)) {
      k().zero_rows(row, row + 1, thread % 4, 4);
    } else if constexpr (C.tiling.cluster > 1) {
      if (poisoned[h]) other_k().zero_rows(row, row + 1, thread % 4, 4);
    }
  }
  join();
}
/// Clears rows of Q and dO before `first` and from `end` on. All consumers call.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::clear_queries(QPosition q_to, DoutPosition dout_to, int first,
                                                      int end) {
  const int among = warpgroup * warpgroup_size + thread;
  shared.q_ring.wait(q_to);
  shared.dout_ring.wait(dout_to);
  shared.q[q_to.stage].zero_rows(0, first, among, threads);
  shared.q[q_to.stage].zero_rows(end, C.tiling.block_m, among, threads);
  shared.dout[dout_to.stage].zero_rows(0, first, among, threads);
  shared.dout[dout_to.stage].zero_rows(end, C.tiling.block_m, among, threads);
  join();
}

/// Clears the rows of query block m that see no key or are past the sequence's end. All consumers call.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::clear_unseeing_queries(const BackwardTile& t, int m, QPosition q_to,
                                                               DoutPosition dout_to) {
  if constexpr (C.mask.causal || C.mask.varlen) {
    const int first = C.mask.causal ? t.visible.first_seeing() - m * C.tiling.block_m : 0;
    const int end = C.mask.varlen ? t.visible.seqlen_q - m * C.tiling.block_m : C.tiling.block_m;
    if (m < t.blocks.end && (first > 0 || end < C.tiling.block_m)) {
      clear_queries(q_to, dout_to, first, max(first, min(end, C.tiling.block_m)));
    }
  }
  if constexpr (C.functions.given()) {
    if (m < t.blocks.end) clear_blind_queries(q_to, dout_to);
  }
}

/// Clears the rows of Q and dO whose LSE says that they see no key, which with functions may be any. All
/// consumers call; each warp looks at the LSE of the whole block, so that all find the same rows.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::clear_blind_queries(QPosition q_to, DoutPosition dout_to) {
  constexpr int words = C.tiling.block_m / warp_size;
  u32 blind[words];
  u32 any = 0;
  shared.q_ring.wait(q_to);
#pragma unroll
  for (int i = 0; i < words; ++i) {
    const float lse = ptx::load_shared(shared.lse_log2[q_to.stage] + i * warp_size + thread % warp_size);
    blind[i] = ptx::ballot(lse == ptx::infinity());
    any |= blind[i];
  }
  if (ptx::reduce_or(any) == 0) return;
  const int among = warpgroup * warpgroup_size + thread;
  shared.dout_ring.wait(dout_to);
#pragma unroll
  for (int i = 0; i < words; ++i) {
#pragma unroll 1
    for (int bit = 0; bit < warp_size; ++bit) {
      if ((blind[i] >> bit & 1U) == 0) continue;
      const int row = i * warp_size + bit;
      shared.q[q_to.stage].zero_rows(row, row + 1, among, threads);
      shared.dout[dout_to.stage].zero_rows(row, row + 1, among, threads);
    }
  }
  join();
}

}  // namespace tandem
