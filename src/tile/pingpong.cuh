// Ping-pong: named barriers give the tensor cores to one consumer warpgroup after another, so that the
// softmax of one warpgroup runs under the products of the others.
#pragma once

#include "ptx/barrier.cuh"

namespace tandem::tile {

/// Named barriers of the forward kernels. Barriers 1 to 3 each admit one consumer warpgroup to the tensor
/// cores; barrier 4 joins all consumers.
constexpr int barrier_pingpong_first = 1;
constexpr int barrier_consumers = 4;

/// Waits until the warpgroup before this one has issued its products.
template <bool pingpong>
TANDEM_DEVICE void pingpong_wait(int warpgroup) {
  if constexpr (pingpong) ptx::named_barrier_sync(barrier_pingpong_first + warpgroup, 2 * warpgroup_size);
}
/// Lets the warpgroup after this one issue its products.
template <bool pingpong, int consumers>
TANDEM_DEVICE void pingpong_pass(int warpgroup) {
  if constexpr (pingpong) {
    const int next = warpgroup + 1 == consumers ? 0 : warpgroup + 1;
    ptx::named_barrier_arrive(barrier_pingpong_first + next, 2 * warpgroup_size);
  }
}

}  // namespace tandem::tile
