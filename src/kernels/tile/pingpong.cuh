// Ping-pong: the consumer warpgroups take turns on the tensor cores, so that one's softmax runs under the
// other's products.
#pragma once

#include "kernels/ptx/barrier.cuh"

namespace tandem {

/// Named barriers: 1 to 3 hand the turn to a consumer warpgroup; 4 joins all consumers.
constexpr int barrier_turn = 1;
constexpr int barrier_consumers = 4;

/// The consumer warpgroups' turns on the tensor cores (ping-pong).
template <bool pingpong>
TANDEM_DEVICE void take_turn_of(int warpgroup) {
  if constexpr (pingpong) ptx::named_barrier_sync(barrier_turn + warpgroup, 2 * warpgroup_size);
}
template <bool pingpong, int consumers>
TANDEM_DEVICE void pass_turn_of(int warpgroup) {
  if constexpr (pingpong) {
    const int next = warpgroup + 1 == consumers ? 0 : warpgroup + 1;
    ptx::named_barrier_arrive(barrier_turn + next, 2 * warpgroup_size);
  }
}

}  // namespace tandem
