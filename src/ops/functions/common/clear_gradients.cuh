// Clears the gradients of captured tensors, to which the main backward kernel adds.
#pragma once

#include "ops/backward/config.hpp"
#include "ptx/memory.cuh"

namespace tandem {

/// The CTAs divide the elements of each tensor. No field of the Config is read.
template <BackwardConfig C>
TANDEM_KERNEL __launch_bounds__(clear_threads) clear_gradients(const __grid_constant__ ClearParams p) {
  const i64 first = static_cast<i64>(ptx::block_index()) * clear_threads + ptx::thread_index();
  const i64 step = static_cast<i64>(ptx::grid_size()) * clear_threads;
  for (int n = 0; n < most_captured; ++n) {
    for (i64 i = first; i < p.counts[n]; i += step) {
      i64 address = reinterpret_cast<i64>(p.gradients[n].data);
      i64 rest = i;
#pragma unroll
      for (int d = 3; d >= 0; --d) {
        address += rest % p.extents[n][d] * p.gradients[n].strides[d];
        rest /= p.extents[n][d];
      }
      ptx::store_global(reinterpret_cast<float*>(address), 0.0F);
    }
  }
}

}  // namespace tandem
