// Scales by row of K and V of 8 bits: one for each key and KV head, addressed as the keys are.
//
// Scales of K are factors of the columns of S, which rounds nothing and leaves the LSE its digits: the
// converter puts a block's into shared memory, beside the tile. Those of V go into V as it is widened, which
// rounds it to 16 bits as a cache of 16 bits would have it, and leaves the chain of softmax and products
// alone.
#pragma once

#include "ptx/eight_bit.cuh"
#include "ptx/memory.cuh"
#include "tile/fragment.cuh"
#include "tile/keys.cuh"

namespace tandem::tile {

/// The scale of key `key` of the tile's sequence; 1 where K, or V, has none by row. Past the end, and in what
/// names no page, nothing is read, and the keys are zeros or masked.
template <KeySource keys>
TANDEM_DEVICE float row_scale(const RowScales& scales, const ForwardParams& p, const TileIndex& t, int key) {
  if (scales.data == nullptr) return 1.0F;
  if (key >= t.seqlen_k) return 0.0F;
  i64 batch = 0;
  int row = key;
  if constexpr (in_pages(keys)) {
    if constexpr (keys == KeySource::padded_pages) row += t.begin_k;
    const int number = row / p.pages.page_size;
    batch = page_at(p.pages, t.batch, number);
    row -= number * p.pages.page_size;
    if (batch < 0) return 0.0F;
  } else {
    batch = key_batch<keys>(p, t);
    row = key_row(t, key);
  }
  return ptx::load_global(scales.data + batch * scales.stride.batch + row * scales.stride.row +
                          key_head(p, t) * scales.stride.head);
}

/// A thread's scores times the scales of their keys, which `scales` has by the keys of the block.
template <int n>
TANDEM_DEVICE void scale_columns(float (&s)[n], const float* scales, const FragmentPosition& position) {
#pragma unroll
  for (int j = 0; j < n / 4; ++j) {
    const u64 two = ptx::load_shared(reinterpret_cast<const u64*>(scales + position.col(j)));
    const float left = ptx::float_of(static_cast<u32>(two));
    const float right = ptx::float_of(static_cast<u32>(two >> 32));
    s[4 * j] *= left;
    s[4 * j + 1] *= right;
    s[4 * j + 2] *= left;
    s[4 * j + 3] *= right;
  }
}

}  // namespace tandem::tile
