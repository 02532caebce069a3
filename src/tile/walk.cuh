// The tiles of queries that a CTA computes, and for each the blocks of keys that it visits.
#pragma once

#include "tile/mask.cuh"
#include "tile/part_merge.cuh"
#include "tile/scheduler.cuh"
#include "tile/select.cuh"
#include "tile/softmax.cuh"
#include "tile/split.cuh"

namespace tandem::tile {

/// A tile, the keys that its queries see, and the range of key blocks to walk. Every warpgroup walks all of
/// them, so that the ping-pong barriers and the ring buffers stay in step.
struct QueryTile {
  TileIndex index;
  Visibility visible;
  BlockRange blocks;
  int part = whole_tile;  ///< the partial result that these blocks are for, or whole_tile
  int parts = 0;          ///< parts of the tile up to this one; 0: it is whole, or this is its first
  int all_parts = 0;      ///< parts that it has, unless this is its first
  MergePlace split;       ///< which of the tile's splits, or of the part's, these blocks are
};

/// All lanes of a warp call.
template <Mask M>
TANDEM_DEVICE Visibility visible_of(const ForwardParams& p, const TileIndex& t) {
  if constexpr (M.by_sequence) {
    const LengthArray& causal = static_cast<const ForwardParamsBySequence&>(p).causal_by_sequence;
    // Rows before the first sequence and past the last one see no key whatever the bound.
    const bool known = causal.data != nullptr && t.batch < p.batch;
    const bool own = ptx::warp_uniform(known ? length_at(causal, t.batch) : 0) != 0;
    return {t.seqlen_q, t.seqlen_k, M.local ? p.window_left : Visibility::unbounded,
            own ? 0 : p.window_right};
  }
  return {t.seqlen_q, t.seqlen_k, M.local ? p.window_left : Visibility::unbounded,
          M.causal ? p.window_right : Visibility::unbounded};
}

/// Tells the softmax which rows of an Output see a key although their scores were all -inf: a softmax of -inf
/// is NaN. All lanes of a warp call.
template <Mask M, typename Output>
TANDEM_DEVICE void find_infinite(OnlineSoftmax& softmax, const Output& output, const TileIndex& t) {
  if (!ptx::any_lane(softmax.has_unseeing())) return;
  const Visibility visible = visible_of<M>(output.p, t);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = output.query_of(t, FragmentPosition(output.thread).row(h));
    if (query < t.seqlen_q && visible.sees_key(query)) softmax.set_infinite(h);
  }
}

/// The tiles of this CTA, one after another. Producer and consumers walk the same ones. `by_number`: of a
/// dynamic scheduler the consumers get numbers and locate tiles themselves, which takes fewer registers.
template <Tiling T, Mask M, bool dynamic, KeySource keys = KeySource::rows, bool by_number = false>
struct QueryTiles {
  const ForwardParams& p;
  StaticScheduler<M.causal && !M.varlen> static_tiles;
  DynamicScheduler dynamic_tiles;
  typename Select<M.varlen, VarlenTiles<T, keys, M.causal && dynamic>, DenseTiles<M.causal>>::type tiles;

  TANDEM_DEVICE QueryTiles(const ForwardParams& params, DynamicScheduler::Shared& shared)
      : p(params), dynamic_tiles(shared, params.tile_counter) {}

  /// All lanes of a warp call; `leader` is true on one of them.
  template <bool producer>
  TANDEM_DEVICE bool next(QueryTile& t, bool leader) {
    bool found;
    if constexpr (dynamic && !producer && !by_number) {
      tiles.take(p, dynamic_tiles.template receive<GivenTile>(leader).index, t.index);
      found = t.index.m >= 0;
    } else {
      // The number is uniform already. The shuffle lets ptxas know, which then keeps loop counts and
      // descriptors in uniform registers; without it each WGMMA waits for four moves. `take` has it, too.
      const int number = next_number<producer>(leader);
      found = tiles.locate(p, ptx::warp_uniform(number), t.index);
      if constexpr (dynamic && !by_number) {
        if (!found) t.index.m = -1;
        dynamic_tiles.give(GivenTile{t.index}, leader);
      }
    }
    if (!found) return false;
    // ptxas does not see either that the lanes leave the search for a sequence together. The dynamic
    // scheduler has synchronised the warp already, and a second synchronisation would undo the effect of the
    // first.
    if constexpr (M.varlen && !dynamic) ptx::sync_warp();
    t.visible = visible_of<M>(p, t.index);
    const int queries = queries_of_tile<T>(p);
    t.blocks = BlockRange::of<T.block_n>(t.visible, t.index.m * queries, (t.index.m + 1) * queries);
    return true;
  }

 private:
  template <bool producer>
  TANDEM_DEVICE int next_number(bool leader) {
    if constexpr (!dynamic) {
      return static_tiles.next();
    } else if constexpr (!producer) {
      return dynamic_tiles.template receive<int>(leader);
    } else {
      const int number = dynamic_tiles.take(leader);
      if constexpr (by_number) dynamic_tiles.give(number, leader);
      return number;
    }
  }
};

/// The blocks of a tile, or of some of its splits, split by split, from the last keys to the first.
struct SplitWalk {
  int first = 0;  ///< blocks [first, rest) are left
  int rest = 0;
  int last = 0;  ///< number of the last split

  TANDEM_DEVICE bool done() const { return rest <= first; }
  TANDEM_DEVICE void begin(const BlockRange& blocks, int split_blocks) {
    first = blocks.first;
    rest = blocks.end;
    last = (rest - 1) / split_blocks;
  }
  /// Makes `t` the next split. Blocks without keys come once, as they are.
  TANDEM_DEVICE void take(QueryTile& t, int split_blocks) {
    const int number = (rest - 1) / split_blocks;
    t.blocks.end = rest;
    t.blocks.first = done() ? first : max(first, number * split_blocks);
    t.split = {number, first / split_blocks, last};
    rest = t.blocks.first;
  }
};

/// Walks each tile of QueryTiles split by split.
template <Tiling T, Mask M, bool dynamic, KeySource keys>
struct QueryTilesBySplit {
  QueryTiles<T, M, dynamic, keys> tiles;
  SplitWalk walk;

  TANDEM_DEVICE QueryTilesBySplit(const ForwardParams& params, DynamicScheduler::Shared& shared)
      : tiles(params, shared) {}

  template <bool producer>
  TANDEM_DEVICE bool next(QueryTile& t, bool leader) {
    if (walk.done()) {
      if (!tiles.template next<producer>(t, leader)) return false;
      walk.begin(t.blocks, tiles.p.split_blocks);
    }
    walk.take(t, tiles.p.split_blocks);
    return true;
  }
};

/// The tiles of a CTA where CTAs share key blocks, or splits.
template <Tiling T, Mask M, KeySource keys, bool by_split = false, bool pairs = false>
struct SplitQueryTiles {
  const ForwardParams& p;
  SplitTiles<T, keys, by_split, pairs> tiles;
  SplitWalk walk;  ///< the walk of an item, by_split

  TANDEM_DEVICE SplitQueryTiles(const ForwardParams& params, DynamicScheduler::Shared&)
      : p(params), tiles{{params}} {}

  template <bool producer>
  TANDEM_DEVICE bool next(QueryTile& t, bool /*leader*/) {
    if constexpr (by_split) {
      if (!walk.done()) {
        walk.take(t, p.split_blocks);
        return true;
      }
    }
    typename SplitTiles<T, keys, by_split, pairs>::Piece piece;
    if (!tiles.next(t.index, piece)) return false;
    ptx::sync_warp();
    t.visible = visible_of<M>(p, t.index);
    const int queries = queries_of_tile<T>(p);
    t.blocks = BlockRange::of<T.block_n>(t.visible, t.index.m * queries, (t.index.m + 1) * queries);
    if constexpr (by_split) {
      t.split = {};
      if (piece.part != whole_tile) {
        const int item_blocks = tiles.line.item_blocks();
        const int item = t.blocks.first / item_blocks + piece.skip;
        t.blocks.first = min(max(t.blocks.first, item * item_blocks), t.blocks.end);
        t.blocks.end = max(t.blocks.first, min((item + 1) * item_blocks, t.blocks.end));
        walk.begin(t.blocks, p.split_blocks);
        walk.take(t, p.split_blocks);
      }
    } else {
      t.blocks.first = min(t.blocks.first + piece.skip, t.blocks.end);
      t.blocks.end = min(t.blocks.first + piece.count, t.blocks.end);
    }
    t.part = piece.part;
    if constexpr (!by_split && !pairs) {
      t.parts = piece.parts;
      t.all_parts = piece.all;
    }
    return true;
  }
};

/// The tiles of a cluster of `ctas` CTAs, one after another, and of the blocks of each the share of this CTA.
template <Tiling T, Mask M, KeySource keys, int ctas>
struct ClusterQueryTiles {
  const ForwardParams& p;
  VarlenTiles<T, keys> packed;
  int number = static_cast<int>(ptx::block_index()) / ctas;

  TANDEM_DEVICE ClusterQueryTiles(const ForwardParams& params, DynamicScheduler::Shared&) : p(params) {}

  template <bool producer>
  TANDEM_DEVICE bool next(QueryTile& t, bool /*leader*/) {
    if (!(p.packed_q ? packed.locate(p, number, t.index) : locate(t.index))) return false;
    number += static_cast<int>(ptx::grid_size()) / ctas;
    t.visible = visible_of<M>(p, t.index);
    const int queries = queries_of_tile<T>(p);
    t.blocks = BlockRange::of<T.block_n>(t.visible, t.index.m * queries, (t.index.m + 1) * queries);
    const int rank = static_cast<int>(ptx::block_index()) % ctas;
    const int first = t.blocks.first;
    const int count = max(t.blocks.end - first, 0);
    t.blocks.first = first + count * rank / ctas;
    t.blocks.end = first + count * (rank + 1) / ctas;
    return true;
  }

 private:
  /// Where all sequences have as many rows of q, no walk over their lengths is needed.
  TANDEM_DEVICE bool locate(TileIndex& t) const {
    const int tiles = p.heads_q * p.m_blocks;
    if (number >= p.batch * tiles) return false;
    t.batch = number / tiles;
    const int within = number - t.batch * tiles;
    t.head = within / p.m_blocks;
    t.m = within - t.head * p.m_blocks;
    locate_sequence<keys>(p, sequence_rows(p.cu_seqlens_q, p.seqused_q, p.rows_q, t.batch), t);
    return true;
  }
};

/// The tiles of a CTA where clusters take whole tiles or each CTA has its share of the keys of all, by the
/// lengths that the device finds.
template <Tiling T, Mask M, KeySource keys, int ctas, bool byte_keys>
struct ClusterOrSplitTiles {
  ClusterQueryTiles<T, M, keys, ctas> clusters;
  SplitQueryTiles<T, M, keys> shares;
  bool in_clusters = false;

  TANDEM_DEVICE ClusterOrSplitTiles(const ForwardParams& p, DynamicScheduler::Shared& shared)
      : clusters(p, shared), shares(p, shared) {}

  template <bool producer>
  TANDEM_DEVICE bool next(QueryTile& t, bool leader) {
    auto& own = shares.tiles;
    if (!own.begun) {
      const LineLength length = own.line.length();
      in_clusters = ptx::warp_uniform(takes_clusters<ctas, keys, byte_keys>(own.line.p, length) ? 1 : 0) != 0;
      own.begin(length);
    }
    if (!in_clusters) return shares.template next<producer>(t, leader);
    t.part = tile_of_cluster;
    return clusters.template next<producer>(t, leader);
  }
};

}  // namespace tandem::tile

namespace tandem {

/// Whether another kernel follows that merges partial results.
template <auto C>
constexpr bool has_combine = C.schedule.split;
template <auto C>
requires requires {
  C.merges_parts;
}
constexpr bool has_combine<C> = false;

/// CTAs of a cluster that share a tile's keys.
template <auto C>
constexpr int sharing_ctas = 1;
template <auto C>
requires requires {
  C.schedule.cluster;
}
constexpr int sharing_ctas<C> = C.schedule.cluster;

/// What the Config's mask reads, and what its epilogue reads and writes.
template <auto C>
using ForwardMaskParams =
    typename Select<C.tiling.gate, ForwardParamsWithGate,
                    typename Select<C.tiling.max_logits, ForwardParamsWithMaxima,
                                    typename Select<C.mask.by_sequence, ForwardParamsBySequence,
                                                    ForwardParams>::type>::type>::type;

}  // namespace tandem
