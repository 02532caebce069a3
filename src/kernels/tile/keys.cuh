// Where the keys of a tile's sequence lie in k and v: the coordinates of their tensor maps. The loaders of
// all forward kernels ask here and nowhere else, so that another layout of keys (pages of a cache) has one
// place. In a dense batch and in a varlen one alike, consecutive keys are consecutive rows.
//
// These are three functions, not one that returns three numbers: ptxas schedules the producer's loop
// differently if the numbers are found at one place.
#pragma once

#include "kernels/config/forward.hpp"
#include "kernels/tile/scheduler.cuh"

namespace tandem::tile {

/// The row of key `key` of the sequence.
TANDEM_DEVICE int key_row(const TileIndex& t, int key) {
  return t.begin_k + key;
}
TANDEM_DEVICE int key_head(const ForwardParams& p, const TileIndex& t) {
  return t.head / (p.heads_q / p.heads_kv);
}
TANDEM_DEVICE int key_batch(const ForwardParams& p, const TileIndex& t) {
  return p.packed_k ? 0 : t.batch;
}

}  // namespace tandem::tile
