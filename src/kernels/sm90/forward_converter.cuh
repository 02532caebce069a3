// Converts 8-bit K and V, as TMA has brought them, to the 16-bit tiles that products read. A warpgroup of its
// own does it, a warp on each of the SM's four schedulers, as far behind TMA and ahead of the consumers as
// the rings have buffers. docs/kernels/eight-bit-caches.md has the arithmetic.
#pragma once

#include "kernels/sm90/forward_producer.cuh"
#include "kernels/tile/widen.cuh"

namespace tandem {

template <ForwardConfig C>
struct ForwardConverter {
  using Shared = ForwardShared<C>;

  Shared& shared;
  const int warp;  ///< number among those that convert
  const int lane;
  typename tile::Ring<C.stages>::Position k_from, v_from;
  typename tile::Ring<converted_stages>::Position k_to, v_to;
  ForwardTiles<C> tiles;
  tile::QueryTile t;

  TANDEM_DEVICE ForwardConverter(const ForwardParams& p, Shared& s, int warp_)
      : shared(s), warp(warp_), lane(static_cast<int>(ptx::thread_index()) % warp_size), tiles(p, s.tiles) {}

  /// The warp's share of a block. What it has stored is fenced for the tensor cores, which read it by
  /// another way, before the warp says that it is there.
  template <typename FromRing, typename From, typename ToRing, typename To>
  TANDEM_DEVICE void convert(FromRing& from_ring, typename FromRing::Position& from_at, From* from,
                             ToRing& to_ring, typename ToRing::Position& to_at, To* to) {
    from_ring.wait(from_at);
    to_ring.wait_free(to_at);
    tile::convert_tile<C.key_type, C.tiling.element, converting_warps>(to[to_at.stage], from[from_at.stage],
                                                                       warp, lane);
    ptx::fence_async_shared();
    ptx::sync_warp();
    if (lane == 0) {
      to_ring.hand_over(to_at);
      from_ring.release(from_at);
    }
    from_at.advance();
    to_at.advance();
  }
  TANDEM_DEVICE void convert_k() {
    convert(shared.loaded_k_ring(), k_from, shared.loaded_k(), shared.k_ring, k_to, shared.k);
  }
  TANDEM_DEVICE void convert_v() {
    convert(shared.loaded_v_ring(), v_from, shared.loaded_v(), shared.v_ring, v_to, shared.v);
  }

  /// In the order in which blocks are loaded and read: K one block ahead of V. Each is at one place in the
  /// loop, for the sake of the instruction cache.
  TANDEM_DEVICE void run() {
    while (tiles.template next<false>(t, lane == 0)) {
      if (t.blocks.first >= t.blocks.end) continue;
      for (int block = t.blocks.end; block >= t.blocks.first; --block) {
        if (block > t.blocks.first) convert_k();
        if (block < t.blocks.end) convert_v();
      }
    }
  }
};

}  // namespace tandem
