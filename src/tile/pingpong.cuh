// Ping-pong: named barriers give the tensor cores to one consumer warpgroup after another, so that the
// softmax of one warpgroup runs under the products of the others.
#pragma once

#include "ptx/barrier.cuh"

namespace tandem::tile {

/// Named barriers of the forward kernels.
enum ForwardBarrier : int {
  barrier_pingpong = 1,  ///< one for each consumer warpgroup, which it admits to the tensor cores
  /// Joins all consumers of a team; in `forward_wide` one for each warpgroup that has O.
  barrier_consumers = 4,
};

/// Clears rows of a tile of V from `first` on. All consumers call, and meet.
template <int consumers, typename Tile>
TANDEM_DEVICE void clear_tail(Tile& tile, int first, int warpgroup, int thread, int team = 0) {
  constexpr int threads = consumers * warpgroup_size;
  tile.zero_rows(first, warpgroup * warpgroup_size + thread, threads);
  ptx::fence_async_shared();
  ptx::named_barrier_sync(barrier_consumers + team, threads);
}

/// Waits until the warpgroup before this one has issued its products.
template <bool pingpong>
TANDEM_DEVICE void pingpong_wait(int warpgroup) {
  if constexpr (pingpong) ptx::named_barrier_sync(barrier_pingpong + warpgroup, 2 * warpgroup_size);
}
/// Lets the warpgroup after this one issue its products.
template <bool pingpong, int consumers>
TANDEM_DEVICE void pingpong_pass(int warpgroup) {
  if constexpr (pingpong) {
    const int next = warpgroup + 1 == consumers ? 0 : warpgroup + 1;
    ptx::named_barrier_arrive(barrier_pingpong + next, 2 * warpgroup_size);
  }
}

}  // namespace tandem::tile
