// Rows that the main backward kernels clear in shared memory, since 0 * NaN is NaN: of keys that are not
// finite, which are also marked by their scores' scale, and of queries that see no key.
#pragma once

#include "ops/backward/config.hpp"
#include "ptx/math.cuh"
#include "ptx/warp.cuh"
#include "tile/backward_scores.cuh"

namespace tandem::tile {

/// Sets the scale of the scores of the thread's key h. One of the four threads that have the key stores it.
template <auto C, typename Consumer>
TANDEM_DEVICE void set_scale(Consumer& c, int h, float value) {
  if (c.thread % 4 == 0 && (C.owns_keys() || c.warpgroup == 0))
    ptx::store_shared(c.shared.key_scale_log2 + c.key_at() + c.position.row(h), value);
}
/// Clears the rows of a block's Q and dO whose LSE says that they see no key, which with functions may be
/// any. Each warp looks at the LSE of the whole block, so that all find the same rows; `ready` waits for dO.
/// True if there are any: then all that compute have to meet.
template <int rows, typename QTile, typename DoutTile, typename Ready>
TANDEM_DEVICE bool clear_blind_queries(const float (&lse)[rows], QTile& q, DoutTile& dout, int lane,
                                       int among, int threads, const Ready& ready) {
  constexpr int words = rows / warp_size;
  u32 blind[words];
  u32 any = 0;
#pragma unroll
  for (int i = 0; i < words; ++i) {
    blind[i] = ptx::ballot(ptx::load_shared(lse + i * warp_size + lane) == ptx::infinity());
    any |= blind[i];
  }
  if (ptx::reduce_or(any) == 0) return false;
  ready();
#pragma unroll
  for (int i = 0; i < words; ++i) {
#pragma unroll 1
    for (int bit = 0; bit < warp_size; ++bit) {
      if ((blind[i] >> bit & 1U) == 0) continue;
      const int row = i * warp_size + bit;
      q.zero_rows(row, row + 1, among, threads);
      dout.zero_rows(row, row + 1, among, threads);
    }
  }
  return true;
}

/// Clears keys that are not finite. dQ = dS K multiplies a key by 0 for queries from which it is hidden. So a
/// row of K that is not finite becomes 0, and the scale of its scores becomes NaN, which reaches the queries
/// that see it. The search costs a read of the tile, during the loads of V and Q. `Consumer` is a
/// BackwardScores with the tiles k() and other_k(), and join() and meet(), in which all threads that compute
/// wait for each other, also for what they have stored, and not.
template <auto C, typename Consumer>
TANDEM_DEVICE void clear_poisoned_keys(Consumer& c) {
  const int among = c.warpgroup * warpgroup_size + c.thread;
  bool found = c.k().template any_nonfinite<C.tiling.element>(0, C.tiling.block_n, among, Consumer::threads);
  if constexpr (C.cluster > 1)
    found |=
        c.other_k().template any_nonfinite<C.tiling.element>(0, C.tiling.block_n, among, Consumer::threads);
#pragma unroll
  for (int u = 0; u < C.key_units(); ++u) {
    c.select_unit(u);
#pragma unroll
    for (int h = 0; h < 2; ++h) set_scale<C>(c, h, c.scale_log2);
  }
  // Each warp stores a word. ptxas takes the result of reduce_or for uniform; otherwise it serialises the
  // products (warning C7520).
  const int lane = c.thread % warp_size;
  const u32 found_in_warp = ptx::reduce_or(found ? 1U : 0U);
  if (lane == 0)
    ptx::store_shared(c.shared.poisoned + (c.warpgroup * warpgroup_size + c.thread) / warp_size,
                      found_in_warp);
  c.meet();
  if (ptx::reduce_or(lane < Consumer::threads / warp_size ? ptx::load_shared(c.shared.poisoned + lane)
                                                          : 0U) == 0)
    return;
  bool poisoned[C.key_units()][2];
#pragma unroll
  for (int u = 0; u < C.key_units(); ++u) {
    c.select_unit(u);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = c.key_at() + c.position.row(h);
      poisoned[u][h] = c.k().template any_nonfinite<C.tiling.element>(row, row + 1, 0, 1);
      if (poisoned[u][h]) set_scale<C>(c, h, ptx::infinity() - ptx::infinity());
      // The other CTA computes the scores of its own keys. Here only this CTA's columns of such keys are
      // cleared.
      if constexpr (C.cluster > 1) {
        if (c.warpgroup == 1)
          poisoned[u][h] = c.other_k().template any_nonfinite<C.tiling.element>(row, row + 1, 0, 1);
      }
    }
  }
  c.join();
#pragma unroll
  for (int u = 0; u < C.key_units(); ++u) {
    c.select_unit(u);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = c.key_at() + c.position.row(h);
      if (poisoned[u][h] && (C.owns_keys() || c.warpgroup == 0)) {
        c.k().zero_rows(row, row + 1, c.thread % 4, 4);
      } else if constexpr (C.cluster > 1) {
        if (poisoned[u][h]) c.other_k().zero_rows(row, row + 1, c.thread % 4, 4);
      }
    }
  }
  c.join();
}

/// As clear_poisoned_keys, of the 16 keys whose scores the warp has, so that warps need not meet for it. True
/// if it has cleared any: then its threads have to fence.
template <auto C, typename Consumer>
TANDEM_DEVICE bool clear_poisoned_keys_of_warp(Consumer& c) {
  static_assert(C.owns_keys() && C.cluster == 1 && C.key_units() == 1);
  const int first = c.key_at() + c.thread / warp_size * 16;
  const bool found =
      c.k().template any_nonfinite<C.tiling.element>(first, first + 16, c.thread % warp_size, warp_size);
  ptx::sync_warp();  // its lanes have read the scales of the tile before
#pragma unroll
  for (int h = 0; h < 2; ++h) set_scale<C>(c, h, c.scale_log2);
  if (ptx::reduce_or(found ? 1U : 0U) == 0) return false;
  bool poisoned[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = c.key_at() + c.position.row(h);
    poisoned[h] = c.k().template any_nonfinite<C.tiling.element>(row, row + 1, 0, 1);
    if (poisoned[h]) set_scale<C>(c, h, ptx::infinity() - ptx::infinity());
  }
  ptx::sync_warp();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = c.key_at() + c.position.row(h);
    if (poisoned[h]) c.k().zero_rows(row, row + 1, c.thread % 4, 4);
  }
  return true;
}

}  // namespace tandem::tile
