// Which rows of K and V a block of keys is.
//
// Where the keys of a tile's sequence lie in k and v, as coordinates of their tensor maps: the rows that
// follow are the keys that follow, in a dense batch and in a varlen one alike. Three functions, and not a
// struct of three numbers: ptxas schedules the producer's loop differently where the numbers are found
// together.
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
