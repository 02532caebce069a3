// Converts 8-bit K and V, as TMA has brought them, to the 16-bit tiles that products read. A warpgroup of its
// own does it, a warp on each of the SM's four schedulers, as far behind TMA and ahead of the consumers as
// the rings have buffers. docs/kernels/eight-bit-caches.md has the arithmetic.
#pragma once

#include "ops/forward/sm90/forward_producer.cuh"
#include "tile/row_scales.cuh"
#include "tile/widen.cuh"

namespace tandem {

/// Scales by row of the next block of K and of V, one of each for a lane: they are loaded while the block
/// before is converted.
template <ForwardConfig C, bool used = C.row_scales>
struct NextScales {
  const ForwardKernelParams<C>& p;
  float k = 0.0F;
  float v = 0.0F;
};
template <ForwardConfig C>
struct NextScales<C, false> {
  TANDEM_DEVICE explicit NextScales(const ForwardParams&) {}
};

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
  [[no_unique_address]] NextScales<C> next;

  TANDEM_DEVICE ForwardConverter(const ForwardKernelParams<C>& p, Shared& s, int warp_)
      : shared(s),
        warp(warp_),
        lane(static_cast<int>(ptx::thread_index()) % warp_size),
        tiles(p, s.tiles),
        next{p} {}

  /// The warp's share of a block, whose rows may have `scales`. What it has stored is fenced for the tensor
  /// cores, which read it by another way, before the warp says that it is there.
  template <typename FromRing, typename From, typename ToRing, typename To, typename... Scales>
  TANDEM_DEVICE void convert(FromRing& from_ring, typename FromRing::Position& from_at, From* from,
                             ToRing& to_ring, typename ToRing::Position& to_at, To* to, Scales... scales) {
    from_ring.wait(from_at);
    to_ring.wait_free(to_at);
    tile::convert_tile<C.key_type, C.tiling.element, converting_warps>(to[to_at.stage], from[from_at.stage],
                                                                       warp, lane, scales...);
    ptx::fence_async_shared();
    ptx::sync_warp();
    if (lane == 0) {
      to_ring.hand_over(to_at);
      from_ring.release(from_at);
    }
    from_at.advance();
    to_at.advance();
  }
  TANDEM_DEVICE void convert_k(int block) {
    if constexpr (C.row_scales) put_key_scales(block);
    convert(shared.loaded_k_ring(), k_from, shared.loaded_k(), shared.k_ring, k_to, shared.k);
  }
  TANDEM_DEVICE void convert_v(int block) {
    if constexpr (C.row_scales) {
      const float scale = next.v;
      if (block > t.blocks.first) load_value_scale(block - 1);
      convert(shared.loaded_v_ring(), v_from, shared.loaded_v(), shared.v_ring, v_to, shared.v, scale);
    } else {
      convert(shared.loaded_v_ring(), v_from, shared.loaded_v(), shared.v_ring, v_to, shared.v);
    }
  }

  // With scales by row alone.
  TANDEM_DEVICE int key_of_lane() const { return warp * warp_size + lane; }
  TANDEM_DEVICE void load_key_scale(int block) {
    if (key_of_lane() < C.tiling.block_n)
      next.k = tile::row_scale<C.keys>(next.p.k_row_scale, next.p, t.index,
                                       block * C.tiling.block_n + key_of_lane());
  }
  TANDEM_DEVICE void load_value_scale(int block) {
    using From = tile::ByteTile<C.tiling.block_n, C.tiling.head_dim_v>;
    next.v = tile::row_scale<C.keys>(
        next.p.v_row_scale, next.p, t.index,
        block * C.tiling.block_n + tile::scaled_row<From, converting_warps>(warp, lane));
  }
  /// Puts the scales of a block of K where consumers find them, before its tile is handed over.
  TANDEM_DEVICE void put_key_scales(int block) {
    const float scale = next.k;
    if (block > t.blocks.first) load_key_scale(block - 1);
    shared.k_ring.wait_free(k_to);
    if (key_of_lane() < C.tiling.block_n)
      ptx::store_shared(&shared.key_scales.of_row[k_to.stage][key_of_lane()], scale);
  }

  /// In the order in which blocks are loaded and read: K one block ahead of V. Each is at one place in the
  /// loop, for the sake of the instruction cache.
  TANDEM_DEVICE void run() {
    while (tiles.template next<false>(t, lane == 0)) {
      if (t.blocks.first >= t.blocks.end) continue;
      if constexpr (C.row_scales) {
        load_key_scale(t.blocks.end - 1);
        load_value_scale(t.blocks.end - 1);
      }
      for (int block = t.blocks.end; block >= t.blocks.first; --block) {
        if (block > t.blocks.first) convert_k(block - 1);
        if (block < t.blocks.end) convert_v(block);
      }
    }
  }
};

}  // namespace tandem
