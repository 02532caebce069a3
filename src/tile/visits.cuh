// The blocks of keys that a tile of the forward kernels visits, one by one: a range, or with a mask function
// those on the tile's list.
#pragma once

#include "tile/functions.cuh"
#include "tile/walk.cuh"

namespace tandem::tile {

/// A block of keys, and whether a list says that the mask function hides nothing of it.
struct KeyVisit {
  int block;
  bool whole;
};
/// Visit `i` of a tile, of [t.blocks.first, t.blocks.end). `uniform`: all lanes of a warp call.
template <Functions F, bool uniform = false, typename Params>
TANDEM_DEVICE KeyVisit key_visit(const Params& p, const TileIndex& t, int i) {
  if constexpr (F.block_lists) {
    const u32* const at = list_of(p.functions.lists, t) + 1 + i;
    const u32 entry = uniform ? uniform_entry(at) : ptx::load_global(at);
    return {static_cast<int>(entry / 2), entry % 2 != 0};
  }
  return {i, false};
}

/// Tiles that have lists: their visits are the lists' entries.
template <typename Tiles>
struct ListedTiles : Tiles {
  const BlockLists& lists;

  template <typename Params>
  TANDEM_DEVICE ListedTiles(const Params& params, DynamicScheduler::Shared& shared)
      : Tiles(params, shared), lists(params.functions.lists) {}

  template <bool producer>
  TANDEM_DEVICE bool next(QueryTile& t, bool leader) {
    if (!Tiles::template next<producer>(t, leader)) return false;
    t.blocks.first = 0;
    t.blocks.end = static_cast<int>(uniform_entry(list_of(lists, t.index)));
    return true;
  }
};

}  // namespace tandem::tile

namespace tandem {

/// The tiles that a CTA computes, but for lists.
template <auto C>
using RangeTiles = typename Select<
    (sharing_ctas<C> > 1),
    typename Select<C.schedule.split,
                    tile::ClusterOrSplitTiles<C.tiling, C.mask, C.keys, sharing_ctas<C>, C.has_byte_keys()>,
                    tile::ClusterQueryTiles<C.tiling, C.mask, C.keys, sharing_ctas<C>>>::type,
    typename Select<
        C.schedule.split, tile::SplitQueryTiles<C.tiling, C.mask, C.keys, C.schedule.invariant, C.pairs>,
        typename Select<C.schedule.invariant,
                        tile::QueryTilesBySplit<C.tiling, C.mask, C.schedule.dynamic, C.keys>,
                        tile::QueryTiles<C.tiling, C.mask, C.schedule.dynamic, C.keys>>::type>::type>::type;
/// The tiles that a CTA computes.
template <auto C>
using ForwardTiles =
    typename Select<C.functions.block_lists, tile::ListedTiles<RangeTiles<C>>, RangeTiles<C>>::type;

}  // namespace tandem
