// Where the keys of a tile's sequence lie in k and v, and how a block of them is loaded. The loaders of all
// forward kernels use these functions and nothing else, so that another layout of keys (pages of a cache) has
// one place. In a dense batch and in a varlen one alike, consecutive keys are consecutive rows.
#pragma once

#include "kernels/config/forward.hpp"
#include "kernels/ptx/tma.cuh"
#include "kernels/tile/scheduler.cuh"

namespace tandem::tile {

/// The coordinates of key `key` of the sequence. They are three functions, not one that returns three
/// numbers: ptxas schedules the producer's loop differently if the numbers are found at one place.
TANDEM_DEVICE int key_row(const TileIndex& t, int key) {
  return t.begin_k + key;
}
TANDEM_DEVICE int key_head(const ForwardParams& p, const TileIndex& t) {
  return t.head / (p.heads_q / p.heads_kv);
}
TANDEM_DEVICE int key_batch(const ForwardParams& p, const TileIndex& t) {
  return p.packed_k ? 0 : t.batch;
}

/// Starts loading the keys from `key` on of the tile's sequence, as many as `to` has rows.
template <typename Tile>
TANDEM_DEVICE void load_keys(Tile& to, const TensorMap& map, ptx::Mbarrier& full, const ForwardParams& p,
                             const TileIndex& t, int key) {
  to.load(map, full, key_row(t, key), key_head(p, t), key_batch(p, t), ptx::CacheHint::last);
}

}  // namespace tandem::tile
