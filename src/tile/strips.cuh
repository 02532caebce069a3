// What tiles of 16 bits and of 8 have in common: strips, one behind the other, of rows of as many bytes.
#pragma once

#include "ptx/memory.cuh"

namespace tandem::tile {

/// Zeroes rows [first, end) of all strips of a tile with `threads` threads; the caller fences and
/// synchronises.
template <int strips, u32 strip_bytes, u32 row_bytes>
TANDEM_DEVICE void zero_rows_of_strips(char* data, int first, int end, int thread, int threads) {
  constexpr int vectors = row_bytes / 16;
  for (int i = first * vectors + thread; i < end * vectors; i += threads) {
#pragma unroll
    for (int s = 0; s < strips; ++s) {
      ptx::store_shared(reinterpret_cast<ptx::Vec4*>(data + s * strip_bytes) + i, ptx::Vec4{0, 0, 0, 0});
    }
  }
}

}  // namespace tandem::tile
