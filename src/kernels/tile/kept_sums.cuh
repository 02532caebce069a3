// Products that are summed over several tiles of keys before they are promoted to f32.
#pragma once

#include "kernels/ptx/memory.cuh"

namespace tandem::tile {

/// The tensor cores add up `every` tiles in a thread's accumulators `o`; those of the tiles before lie in
/// shared memory, four in `slot(j)`, where f32 sums them.
template <int outputs, int every>
struct KeptSums {
  int tiles = 0;        ///< whose products are in the accumulators
  bool folded = false;  ///< earlier ones are in shared memory

  /// Before the products of another tile are added to the accumulators.
  template <typename Slot>
  TANDEM_DEVICE void before_tile(float (&o)[outputs], Slot slot) {
    if (tiles < every) {
      ++tiles;
      return;
    }
    tiles = 1;
#pragma unroll
    for (int j = 0; j < outputs / 4; ++j) {
      ptx::Float4& kept = slot(j);
      ptx::Float4 x{o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]};
      if (folded) {
        const ptx::Float4 before = ptx::load_shared(&kept);
        x = {x.x + before.x, x.y + before.y, x.z + before.z, x.w + before.w};
      }
      ptx::store_shared(&kept, x);
      o[4 * j] = o[4 * j + 1] = o[4 * j + 2] = o[4 * j + 3] = 0.0F;
    }
    folded = true;
  }

  /// Adds the earlier tiles' at the end.
  template <typename Slot>
  TANDEM_DEVICE void take(float (&o)[outputs], Slot slot) const {
    if (!folded) return;
#pragma unroll
    for (int j = 0; j < outputs / 4; ++j) {
      const ptx::Float4 before = ptx::load_shared(&slot(j));
      o[4 * j] += before.x;
      o[4 * j + 1] += before.y;
      o[4 * j + 2] += before.z;
      o[4 * j + 3] += before.w;
    }
  }

  /// A row's reference has moved: row h of the two that a thread has.
  template <typename Slot>
  TANDEM_DEVICE void scale(int h, float factor, Slot slot) const {
    if (!folded) return;
#pragma unroll 1
    for (int j = 0; j < outputs / 4; ++j) {
      ptx::Float4 x = ptx::load_shared(&slot(j));
      if (h == 0) {
        x.x *= factor;
        x.y *= factor;
      } else {
        x.z *= factor;
        x.w *= factor;
      }
      ptx::store_shared(&slot(j), x);
    }
  }
};

}  // namespace tandem::tile
