// The shared storage of `forward`, `forward_wide` and `decode`, and the producer warp that fills it. C is the
// Config of any of them.
#pragma once

#include "ops/forward/config.hpp"
#include "ops/forward/sm90/key_groups.cuh"
#include "ptx/barrier.cuh"
#include "tile/byte_tile.cuh"
#include "tile/functions.cuh"
#include "tile/keys.cuh"
#include "tile/pipeline.cuh"
#include "tile/select.cuh"
#include "tile/shared_tile.cuh"
#include "tile/visits.cuh"

namespace tandem {

/// Params with the scales of K and V of 8 bits.
template <auto C>
using ForwardScaledParams = typename Select<C.row_scales, WithRowScales<WithKeyScales<ForwardMaskParams<C>>>,
                                            WithKeyScales<ForwardMaskParams<C>>>::type;
/// Threads copy K and V (forward_gatherer.cuh).
template <auto C>
constexpr bool gathers = false;
template <auto C>
requires requires {
  C.gathers();
}
constexpr bool gathers<C> = C.gathers();

/// What the kernel is launched with, but for functions.
template <auto C>
using ForwardPlainParams = typename Select<
    gathers<C>, WithValueAddress<ForwardMaskParams<C>>,
    typename Select<C.has_byte_keys(), ForwardScaledParams<C>, ForwardMaskParams<C>>::type>::type;
/// What the kernel is launched with.
template <auto C>
using ForwardKernelParams =
    typename Select<C.functions.given(), WithFunctions<ForwardPlainParams<C>>, ForwardPlainParams<C>>::type;

// ---- Shared storage ----

/// Tiles of 8 bits are converted in shared memory.
template <auto C>
constexpr bool converts = C.byte_stages() > 0;

/// Arrivals that fill a tile of K or V.
template <auto C>
constexpr int filling_arrivals = converts<C>  ? converting_warps
                                 : gathers<C> ? gathering_warps
                                              : 1;

/// K and V as memory has them, where they are converted.
template <auto C, bool used = converts<C>>
struct ByteKeys {
  tile::ByteTile<C.tiling.block_n, C.tiling.head_dim_qk> k[C.stages];
  tile::ByteTile<C.tiling.block_n, C.tiling.head_dim_v> v[C.stages];
};
template <auto C>
struct ByteKeys<C, false> {};
template <auto C, bool used = converts<C>>
struct ByteKeyRings {
  tile::Ring<C.stages> k;
  tile::Ring<C.stages> v;
};
template <auto C>
struct ByteKeyRings<C, false> {};

/// Scales by row of the keys of each tile of K that products read.
template <auto C, bool used = C.row_scales&& converts<C>>
struct KeyScaleTiles {
  alignas(8) float of_row[converted_stages][C.tiling.block_n];
};
template <auto C>
struct KeyScaleTiles<C, false> {};

/// A block of K or V as products read it.
template <auto C, int head_dim>
using KeyTile = typename Select<C.has_byte_keys() && !converts<C>, tile::ByteTile<C.tiling.block_n, head_dim>,
                                tile::SharedTile<C.tiling.block_n, head_dim>>::type;

/// V, unless it is the first columns of K.
struct NoValues {};

template <auto C>
struct ForwardShared {
  using QTile = tile::SharedTile<C.tiling.unit(), C.tiling.head_dim_qk>;
  using KTile = KeyTile<C, C.tiling.head_dim_qk>;
  using VTile = KeyTile<C, C.tiling.head_dim_v>;

  QTile q[C.consumers()][C.q_stages];
  KTile k[C.tile_stages()];
  [[no_unique_address]] typename Select<C.v_in_k, NoValues, VTile[C.tile_stages()]>::type v;
  [[no_unique_address]] ByteKeys<C> bytes;
  KeyRing<C> k_ring;
  [[no_unique_address]] MoreKeyRings<C> more_k_rings;
  tile::Ring<C.tile_stages()> v_ring;
  tile::Ring<C.q_stages> q_ring[C.consumers()];
  [[no_unique_address]] ByteKeyRings<C> byte_rings;
  [[no_unique_address]] KeyScaleTiles<C> key_scales;
  tile::DynamicScheduler::Shared tiles;

  /// One thread calls, before the others use any barrier.
  TANDEM_DEVICE void init() {
    if constexpr (C.v_in_k) {
      for (int g = 0; g < key_groups(C); ++g) k_group_ring(g).init(KeyGroups<C>::warps(g));
    } else {
      k_ring.init(C.warps_of_k(), filling_arrivals<C>);
    }
    v_ring.init(C.warps_of_v(), filling_arrivals<C>);
    for (int w = 0; w < C.consumers(); ++w) q_ring[w].init(4);
    if constexpr (converts<C>) {
      byte_rings.k.init(converting_warps);
      byte_rings.v.init(converting_warps);
    }
    tiles.ring.init(C.consumers() * 4 + (converts<C> ? converting_warps : 0) +
                    (gathers<C> ? gathering_warps - 1 : 0));
    ptx::fence_mbarrier_init();
  }

  /// The ring of a group of K's strips: of all of them, unless V is in K.
  TANDEM_DEVICE auto& k_group_ring([[maybe_unused]] int group) {
    if constexpr (C.v_in_k) {
      return group == 0 ? k_ring : more_k_rings.of_group[group - 1];
    } else {
      return k_ring;
    }
  }

  // What TMA fills: the tiles that products read, or those that are converted first.
  TANDEM_DEVICE auto* loaded_k() {
    if constexpr (converts<C>) {
      return bytes.k;
    } else {
      return k;
    }
  }
  TANDEM_DEVICE auto* loaded_v() {
    if constexpr (converts<C>) {
      return bytes.v;
    } else {
      return v;
    }
  }
  TANDEM_DEVICE auto& loaded_k_ring() {
    if constexpr (converts<C>) {
      return byte_rings.k;
    } else {
      return k_ring;
    }
  }
  TANDEM_DEVICE auto& loaded_v_ring() {
    if constexpr (converts<C>) {
      return byte_rings.v;
    } else {
      return v_ring;
    }
  }
};

// ---- Producer ----

/// Where the block that K needs next lies in its pages, and that of V, which is the one before: of each
/// lane's first box.
template <bool used>
struct PagePlaces {
  tile::PageDivider divider;
  tile::PagePlace k, v;

  TANDEM_DEVICE explicit PagePlaces(const ForwardParams& p) : divider(p.pages.page_size) {}
};
template <>
struct PagePlaces<false> {
  TANDEM_DEVICE explicit PagePlaces(const ForwardParams&) {}
};

/// Starts the copies in the order in which the consumers need them: blocks from right to left, K one block
/// ahead of V. All lanes of one warp call; the leader starts copies.
template <auto C>
struct ForwardLoader {
  using Shared = ForwardShared<C>;

  /// Boxes of pages are many: all lanes start copies.
  static constexpr bool by_all_lanes = in_pages(C.keys);

  const ForwardKernelParams<C>& p;
  Shared& shared;
  const bool leader;
  typename tile::Ring<C.stages>::Position k_at, v_at;
  typename tile::Ring<C.q_stages>::Position q_at;
  ForwardTiles<C> tiles;
  tile::QueryTile t;
  int block = -1;   ///< whose V is loaded next
  int kv_head = 0;  ///< that of the tile: its divisions take as long as starting a copy
  [[no_unique_address]] PagePlaces<by_all_lanes> places;

  TANDEM_DEVICE ForwardLoader(const ForwardKernelParams<C>& params, Shared& s)
      : p(params), shared(s), leader(ptx::elect_one()), tiles(params, s.tiles), places(params) {
    t.blocks = {0, 0, 0, 0};
  }

  TANDEM_DEVICE void load_k(int b) {
    if constexpr (by_all_lanes) {
      places.k = tile::page_place<C.keys>(p, t.index, places.divider, b * C.tiling.block_n,
                                          lane() * p.pages.box_rows);
    }
    if constexpr (C.v_in_k) {
      load_k_groups(b);
    } else if constexpr (by_all_lanes) {
      load_pages(shared.loaded_k_ring(), k_at, shared.loaded_k()[k_at.stage], p.k, b, places.k);
    } else {
      auto& to = shared.loaded_k()[k_at.stage];
      ptx::Mbarrier& full = shared.loaded_k_ring().acquire(k_at, to.bytes);
      tile::load_keys<C.keys>(to, p.k, full, p, t.index, first_key(b), kv_head, hint());
    }
    k_at.advance();
  }
  TANDEM_DEVICE void load_v(int b) {
    if constexpr (C.v_in_k)
      return;
    else if constexpr (by_all_lanes) {
      load_pages(shared.loaded_v_ring(), v_at, shared.loaded_v()[v_at.stage], p.v, b, places.v);
    } else {
      auto& to = shared.loaded_v()[v_at.stage];
      ptx::Mbarrier& full = shared.loaded_v_ring().acquire(v_at, to.bytes);
      tile::load_keys<C.keys>(to, p.v, full, p, t.index, first_key(b), kv_head, hint());
    }
    v_at.advance();
  }
  template <int g = 0>
  TANDEM_DEVICE void load_k_groups(int b) {
    using Strips = KeyStrips<C, typename Shared::KTile, g>;
    Strips to{shared.k[k_at.stage]};
    // The CTAs of a pair take turns, so that each loads half of groups of one strip, too.
    if constexpr (C.pairs) to.turn = (static_cast<int>(ptx::block_index()) + k_at.stage + g) % 2;
    if constexpr (by_all_lanes) {
      load_pages(shared.k_group_ring(g), k_at, to, p.k, b, places.k);
    } else {
      ptx::Mbarrier& full = shared.k_group_ring(g).acquire(k_at, to.bytes);
      tile::load_keys<C.keys>(to, p.k, full, p, t.index, first_key(b), kv_head, hint());
    }
    if constexpr (g + 1 < KeyGroups<C>::count) load_k_groups<g + 1>(b);
  }
  /// The first key of visit `b`.
  TANDEM_DEVICE int first_key(int b) const {
    return tile::key_visit<C.functions>(p, t.index, b).block * C.tiling.block_n;
  }
  /// Block `b` of K or V from pages: all lanes share its boxes.
  template <typename Ring, typename Position, typename Tile>
  TANDEM_DEVICE void load_pages(Ring& ring, const Position& at, Tile& to, const TensorMap& map, int b,
                                const tile::PagePlace& place) {
    if (leader) ring.acquire(at, Tile::bytes);
    ptx::sync_warp();
    tile::load_pages<C.keys>(to, map, ring.full[at.stage], p, t.index, places.divider, b * C.tiling.block_n,
                             kv_head, lane(), place, hint());
  }
  static TANDEM_DEVICE int lane() { return static_cast<int>(ptx::thread_index()) % warp_size; }
  TANDEM_DEVICE ptx::CacheHint hint() const {
    constexpr int sharing = sharing_ctas<C>;
    constexpr bool shared_keys = C.schedule.split || sharing > 1;
    constexpr int tiles_at_once = C.pairs ? 2 : 1;
    return tile::hint_of<shared_keys, C.tiling, tiles_at_once>(p, t.index);
  }
  /// Loads Q; the first K follows Q of the first warpgroup.
  TANDEM_DEVICE void load_q() {
    const int row = t.index.begin_q + tile::first_query<C.tiling>(p, t.index.m, 0);
    for (int w = 0; w < C.consumers(); ++w) {
      if (!by_all_lanes || leader) {
        ptx::Mbarrier& full =
            shared.q_ring[w].acquire(q_at, tile::queries_bytes<C.tiling, typename Shared::QTile>(p));
        tile::load_queries<C.tiling>(shared.q[w][q_at.stage], full, p, t.index,
                                     row + w * tile::queries_of_unit<C.tiling>(p));
      }
      if (w == 0) load_k(t.blocks.end - 1);
    }
    q_at.advance();
  }

  /// Loads what the consumers need for one more block: its V, K of the block after it, and at the beginning
  /// of a tile also Q and the first K. False if nothing is left.
  TANDEM_DEVICE bool step() {
    if (block < t.blocks.first) {
      do {
        if (!tiles.template next<true>(t, leader)) return false;
      } while (t.blocks.first >= t.blocks.end);
      block = t.blocks.end - 1;
      kv_head = tile::key_head(p, t.index);
      if (by_all_lanes || leader) load_q();
    }
    if (by_all_lanes || leader) {
      if constexpr (by_all_lanes) places.v = places.k;
      if (block > t.blocks.first) load_k(block - 1);
      load_v(block);
    }
    --block;
    return true;
  }
  TANDEM_DEVICE void run() {
    while (step()) {
    }
  }
};

/// `shared` makes the barriers, and what Q does not fill is cleared.
template <auto C, typename Shared>
TANDEM_DEVICE void prepare_forward(const ForwardParams& p, Shared& shared, ForwardShared<C>& in) {
  if (ptx::thread_index() == 0) shared.init();
  for (int w = 0; w < C.consumers(); ++w) {
    for (auto& q : in.q[w]) {
      tile::clear_unfilled<C.tiling>(q, p, static_cast<int>(ptx::thread_index()), C.threads());
    }
  }
}

/// How the forward kernels begin.
template <auto C, typename Shared>
TANDEM_DEVICE void begin_forward(const ForwardParams& p, Shared& shared, ForwardShared<C>& in) {
  prepare_forward<C>(p, shared, in);
  constexpr int sharing = sharing_ctas<C>;
  if constexpr (sharing > 1) {
    ptx::sync_block();
    ptx::arrive_cluster();  // waited for where the CTAs meet
  } else {
    ptx::sync_blocks<C.cluster()>();
  }
  if constexpr (has_combine<C>) ptx::launch_next_grid();
}

/// Replaces the loader of a consumer if there is a producer warp.
template <auto C>
struct ForwardNoLoader {
  TANDEM_DEVICE ForwardNoLoader(const ForwardParams&, ForwardShared<C>&) {}
  TANDEM_DEVICE bool step() { return false; }
};

}  // namespace tandem
