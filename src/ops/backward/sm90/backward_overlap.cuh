// What the main backward kernel's tiles need to follow each other in ping-pong without a gap
// (BackwardSchedule::overlaps_tiles): two buffers of K, and tiles that the loader finds for the consumers.
#pragma once

#include "ops/backward/sm90/backward_consumer.cuh"

namespace tandem {

template <BackwardConfig C>
struct OverlapConsumer : BackwardConsumer<C> {
  using Base = BackwardConsumer<C>;
  using Base::Base;
  using Base::p;
  using Base::shared;
  using Base::thread;

  using KPosition = typename tile::Ring<C.key_stages()>::Position;
  static_assert(!C.schedule.overlaps_tiles || (C.key_stages() == 2 && v_stages == 1));
  static constexpr KPosition before_first{1, 1};
  /// V has one buffer: every other tile has the other phase.
  TANDEM_DEVICE tile::Ring<v_stages>::Position v_position() const {
    return {0, static_cast<u32>(this->k_at.stage)};
  }

  /// Waits for the next tile's K, and says whether there is a tile.
  TANDEM_DEVICE bool next_tile(BackwardTile& t) const {
    KPosition next = this->k_at;
    next.advance();
    shared.k_ring.wait(next);
    t = tile_of(next.stage);
    BackwardTiles<C>::uniform(t.blocks.first, t.blocks.end, t.blocks.inner_first, t.blocks.inner_end);
    return t.blocks.first < t.blocks.end;
  }
  /// The tile whose K is in a buffer. What all tiles of a Config share is known without it.
  TANDEM_DEVICE BackwardTile tile_of(int stage) const {
    BackwardTile t = ptx::load_shared(&shared.described.tiles[stage]);
    if constexpr (!C.mask.varlen) {
      t.begin_q = t.begin_k = 0;
      t.end_k = t.visible.seqlen_k = p.rows_k;
      t.visible.seqlen_q = p.rows_q;
    }
    t.visible.left = C.mask.local ? p.window_left : tile::Visibility::unbounded;
    t.visible.right = C.mask.causal ? p.window_right : tile::Visibility::unbounded;
    return t;
  }

  /// For what is done once a tile: ptxas would keep addresses for it from tile to tile, in local memory.
  TANDEM_DEVICE OverlapConsumer anew() const {
    OverlapConsumer c(p, shared, this->warpgroup,
                      static_cast<int>(ptx::thread_index_anew()) % warpgroup_size);
    c.k_at = this->k_at;
    c.q_at = this->q_at;
    c.dout_at = this->dout_at;
    return c;
  }
  TANDEM_DEVICE decltype(auto) anew_if_overlapping() {
    if constexpr (C.schedule.overlaps_tiles) {
      return anew();
    } else {
      return (*this);
    }
  }
  /// Clears what must not be multiplied of the keys whose scores this warp has. dQ reads those of the other
  /// warps too, when both warpgroups have begun the tile.
  TANDEM_DEVICE void begin_keys_of_warp(const BackwardTile& t) {
    bool clears = false;
    if constexpr (Base::hides) clears = tile::clear_poisoned_keys_of_warp<C>(*this);
    if constexpr (C.mask.varlen) {
      const int keys = t.visible.seqlen_k - t.first_key;
      if (keys < C.tiling.block_n) {
        const int first = this->key_at() + thread / warp_size * 16;
        const auto zero = [&](auto& rows) {
          rows.zero_rows(max(keys, first), first + 16, thread % warp_size, warp_size);
        };
        shared.v_ring.wait(v_position());
        ptx::sync_warp();  // its lanes have looked at K
        zero(this->k());
        zero(this->v());
        clears = true;
      }
    }
    if (clears) ptx::fence_async_shared();
  }

  /// Writes dK and dV of the tile in buffer `stage`, and begins those of the next one.
  template <int n, int m>
  TANDEM_DEVICE void store_tile(int stage, float (&dk)[n], float (&dv)[m]) {
    const BackwardTile t = tile_of(stage);
    this->store_keys(t, dk);
    this->store_values(t, dv);
    tile::set_zero(dk);
    tile::set_zero(dv);
    ptx::sync_warp();  // its lanes have read what the tile is
  }

  TANDEM_DEVICE void release_v(bool last) {
    if (last && this->releases()) shared.v_ring.release(v_position());
  }
  TANDEM_DEVICE void release_k(int stage) {
    if (this->releases()) shared.k_ring.release({stage, 0});
  }
  /// A dQ has been made, which was the last that takes the tile before if one was late.
  TANDEM_DEVICE void count_dq() {
    if (this->late > 0 && --this->late == 0) release_k(this->k_at.stage ^ 1);
  }
};

/// Tiles without a visit pass none of the consumers: one warp writes the zeros that are their dK and dV.
template <BackwardConfig C>
TANDEM_DEVICE void store_unseen_keys(const BackwardKernelParams<C>& p, BackwardShared<C>& shared) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  BackwardTiles<C> tiles(p);
  BackwardTile t;
  while (tiles.next(t)) {
    if (has_visits<C>(p, t)) continue;
#pragma unroll 1
    for (int warp = 0; warp < C.consumers * 4; ++warp) {
      tile::BackwardScores<C, BackwardShared<C>> rows(p, shared, warp / 4, warp % 4 * warp_size + lane);
      float dk[C.tiling.head_dim_qk / 2];
      float dv[C.tiling.head_dim_v / 2];
      tile::set_zero(dk);
      tile::set_zero(dv);
      rows.store_keys(t, dk);
      rows.store_values(t, dv);
    }
  }
}

}  // namespace tandem
