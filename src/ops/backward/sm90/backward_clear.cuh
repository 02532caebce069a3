// Rows of the tiles in shared memory that the consumers of the main backward kernel must not multiply. They
// are set to zero, since 0 * NaN is NaN.
#pragma once

#include "ops/backward/sm90/backward_consumer.cuh"

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
  if constexpr (C.cluster > 1) {
    const int other = t.first_key + BackwardTiles<C>::other_keys();
    other_k().zero_rows(valid(other), among, threads);
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

/// Clears the rows of query block m that see no key or are past the sequence's end. All consumers call. Of
/// blocks that are not `masked` all rows see keys.
template <BackwardConfig C>
template <bool masked>
TANDEM_DEVICE void BackwardConsumer<C>::clear_unseeing_queries(const BackwardTile& t, int m, QPosition q_to,
                                                               DoutPosition dout_to) {
  if constexpr ((C.mask.causal && masked) || C.mask.varlen) {
    const int begins = C.mask.causal && masked ? t.visible.first_seeing() - m * C.tiling.block_m : 0;
    const int ends = C.mask.varlen ? t.visible.seqlen_q - m * C.tiling.block_m : C.tiling.block_m;
    if (m < t.blocks.end && (begins > 0 || ends < C.tiling.block_m)) {
      // Otherwise ptxas computes what this takes before the branch, in every step. (Wide heads have no
      // register for that.)
      const int first = C.owns_keys() ? ptx::forgotten(begins) : begins;
      const int end = C.owns_keys() && C.mask.varlen ? ptx::forgotten(ends) : ends;
      clear_queries(q_to, dout_to, first, max(first, min(end, C.tiling.block_m)));
    }
  }
  if constexpr (C.functions.given()) {
    if (m < t.blocks.end) clear_blind_queries(q_to, dout_to);
  }
}

/// Clears queries that see no key whatever the mask says.
template <BackwardConfig C>
TANDEM_DEVICE void BackwardConsumer<C>::clear_blind_queries(QPosition q_to, DoutPosition dout_to) {
  shared.q_ring.wait(q_to);
  if (tile::clear_blind_queries(shared.lse_log2[q_to.stage], shared.q[q_to.stage], shared.dout[dout_to.stage],
                                thread % warp_size, warpgroup * warpgroup_size + thread, threads,
                                [&] { shared.dout_ring.wait(dout_to); })) {
    join();
  }
}

}  // namespace tandem
