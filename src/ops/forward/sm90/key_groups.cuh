// The strips of a tile of K whose first columns are V, in groups that are loaded, and given back, each by
// itself. K of the block after the next takes the place of this one's, which the products of P V read last:
// a group's copy starts when the product that reads its columns has ended, and scores begin with the first
// group that has come. In one piece, a tile's copy would start when all products have ended, and be waited
// for as a whole.
#pragma once

#include "ops/latent/config.hpp"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"
#include "tile/select.cuh"

namespace tandem {

/// The groups in the order in which they are loaded and scored, which is that in which they become free: what
/// is not V, then the columns of each warpgroup's first product with P, then those of its next.
template <LatentConfig C>
struct KeyGroups {
  static constexpr int strip = 64;  ///< columns
  static constexpr int columns = C.tiling.head_dim_v / latent_slices;
  static constexpr int width = wide_product_columns(C);
  static constexpr int rest = C.tiling.head_dim_qk > C.tiling.head_dim_v ? 1 : 0;
  static constexpr int count = key_groups(C);
  static_assert(C.tiling.head_dim_qk % strip == 0 && width % strip == 0);

  /// The group of the `product`-th product of warpgroup `part`.
  static constexpr int of(int part, int product) { return rest + product * latent_slices + part; }
  static constexpr int first_strip(int group) {
    if (group < rest) return C.tiling.head_dim_v / strip;
    return ((group - rest) % latent_slices * columns + (group - rest) / latent_slices * width) / strip;
  }
  static constexpr int strips(int group) {
    return (group < rest ? C.tiling.head_dim_qk - C.tiling.head_dim_v : width) / strip;
  }
  /// Warps that read it: those that score, and of V those of one other warpgroup.
  static constexpr int warps(int group) { return group < rest ? 4 : 8; }
};

/// Strips [first, first + count) of a tile, as what is loaded.
template <typename Tile, int first, int count>
struct StripsOf {
  static constexpr int row_count = Tile::row_count;
  static constexpr u32 bytes = count * Tile::strip_bytes;

  Tile& tile;

  TANDEM_DEVICE void load(const TensorMap& map, ptx::Mbarrier& bar, i32 row, i32 head, i32 batch,
                          ptx::CacheHint hint) {
    load_rows(0, map, bar, row, head, batch, hint);
  }
  TANDEM_DEVICE void load_rows(int to, const TensorMap& map, ptx::Mbarrier& bar, i32 row, i32 head, i32 batch,
                               ptx::CacheHint hint) {
#pragma unroll
    for (int s = first; s < first + count; ++s) {
      ptx::tma_load(tile.data + s * Tile::strip_bytes + to * Tile::row_bytes, map, bar, s * Tile::strip_cols,
                    row, head, batch, hint);
    }
  }
};

/// The strips of a CTA of a cluster of two, which loads every second strip for both, from the `turn`-th (0 or
/// 1) on. The other CTA loads those between.
template <typename Tile, int first, int count>
struct EverySecondStripOf {
  static constexpr int row_count = Tile::row_count;
  static constexpr u32 bytes = count * Tile::strip_bytes;

  Tile& tile;
  int turn = 0;

  TANDEM_DEVICE void load(const TensorMap& map, ptx::Mbarrier& bar, i32 row, i32 head, i32 batch,
                          ptx::CacheHint hint) {
    load_rows(0, map, bar, row, head, batch, hint);
  }
  TANDEM_DEVICE void load_rows(int to, const TensorMap& map, ptx::Mbarrier& bar, i32 row, i32 head, i32 batch,
                               ptx::CacheHint hint) {
#pragma unroll
    for (int i = 0; i < count; i += 2) {
      if (i + 1 == count && turn != 0) break;
      const int s = first + i + turn;
      ptx::tma_load_both(tile.data + s * static_cast<int>(Tile::strip_bytes) + to * Tile::row_bytes, map, bar,
                         s * Tile::strip_cols, row, head, batch, hint);
    }
  }
};

/// Group `g` as what a CTA loads of it.
template <LatentConfig C, typename Tile, int g>
using KeyStrips =
    typename Select<C.pairs, EverySecondStripOf<Tile, KeyGroups<C>::first_strip(g), KeyGroups<C>::strips(g)>,
                    StripsOf<Tile, KeyGroups<C>::first_strip(g), KeyGroups<C>::strips(g)>>::type;

/// The ring of a group of strips, or of all of K.
template <auto C>
using KeyRing = typename Select<C.pairs, tile::PairRing<C.tile_stages()>, tile::Ring<C.tile_stages()>>::type;

/// The rings of all groups but the first, which has the ring of K.
template <auto C, bool used = C.v_in_k>
struct MoreKeyRings {
  KeyRing<C> of_group[KeyGroups<C>::count - 1];
};
template <auto C>
struct MoreKeyRings<C, false> {};

}  // namespace tandem
