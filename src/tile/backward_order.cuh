// Which tile of keys a CTA of the backward pass computes in which round, with which query block it begins,
// and in which order tiles add to dQ.
#pragma once

#include "ops/backward/config.hpp"
#include "tile/mask.cuh"

namespace tandem {

/// Tile n of a head's keys, and the query blocks that see any of it.
struct BackwardTile {
  int n = 0;
  int first_key = 0;  ///< where this CTA's keys begin in the sequence
  int head_kv = 0;
  int batch = 0;
  int begin_q = 0;
  int begin_k = 0;
  int end_k = 0;  ///< rows of k, with those that are not in use: their gradients are written too
  int q_block = 0;
  /// With a staggered start: the head's tiles of this round. In a fixed causal order, if the round runs
  /// backwards: those of the head's tiles that the round may contain, which add in ascending order. Otherwise
  /// empty.
  int round_first = 0;
  int round_last = -1;
  int tiles = 0;  ///< staggered: how many the head has
  int start = 0;  ///< staggered: the query block with which the tile begins
  tile::Visibility visible;
  tile::QueryBlockRange blocks;
};

/// A static persistent scheduler: in round r each CTA takes one tile. Tiles of one head have neighbouring
/// numbers, so that the CTAs that share its Q, dO and dQ in the L2 run at the same time.
///
/// Masked tiles differ in work: the earlier the keys of a causal tile, the more queries see them. Tiles are
/// therefore assigned in pairs: the longest of a head with its shortest, the second longest with the second
/// shortest, and so on, so that every pair is the same work. (Assigned singly, 132 CTAs with 128 tiles a head
/// get tiles of the same length in every round: 0.59 of the speed of an even division.) A last round of pairs
/// that is not full costs 3 % of 2048 tiles on 132 CTAs, a last round of the shortest tiles 1 %. For wide
/// heads with many tiles, the last two to four causal rounds are therefore assigned singly: the longest tiles
/// of all remaining heads first, every second round backwards. So are all rounds where there are many more
/// keys than queries (p.pairs is false, causal_pairs): most tiles are then as long as the longest, and pairs
/// from equal to twice the work.
///
/// With a staggered start the tiles of a head begin at different query blocks and wrap round, so that
/// additions to dQ do not meet. In a fixed order a tile's i-th block then waits only for earlier rounds, and
/// for tiles that reach the same query block as their i-th block or earlier: waits are short and cannot form
/// a circle.
///
/// Without it, in a fixed causal order, the latest keys add to a query block first. CTAs that start at the
/// same time then start at different query blocks, and none waits. Every second round runs backwards, which
/// balances the work (backward_grid makes the number of rounds even). The CTAs of such a round start later by
/// the work of their previous tile, so that all reach a query block at the same time, and the earliest keys
/// add first, since their tiles start first. (With the latest first there too, each tile waited for all
/// others: 0.73 of the speed of any order at head dimension 64, where the model above says 0.75; this way it
/// is 0.93.) A tile waits for earlier rounds, and in its own round for tiles that come before it in one order
/// for all query blocks. All CTAs are resident, so they cannot wait for each other in a circle.
template <auto C>
struct BackwardOrder {
  static constexpr bool paired =
      (C.mask.causal || C.mask.local || C.functions.block_lists) && !C.schedule.deterministic;
  /// As measured: head dimension 64 loses 1 % by it, and so do heads with fewer tiles.
  static constexpr bool sorted_end =
      paired && C.mask.causal && !C.mask.local && !C.mask.varlen && C.tiling.head_dim_qk >= 128;
  static constexpr int sorted_from_tiles = 32;
  static constexpr bool latest_first = C.mask.causal && C.schedule.deterministic;
  static_assert(!C.schedule.staggered || !(C.mask.causal || C.mask.local || C.mask.varlen));

  /// The CTA's rank in its cluster.
  static TANDEM_DEVICE int rank() {
    if constexpr (C.cluster == 1) return 0;
    return static_cast<int>(ptx::block_index()) % C.cluster;
  }
  /// The distance from this CTA's first key to the other CTA's.
  static TANDEM_DEVICE int other_keys() { return rank() == 0 ? C.tiling.block_n : -C.tiling.block_n; }
  /// Where progress is kept it is read again for each tile: it would take local memory from tile to tile.
  static TANDEM_DEVICE int clusters() {
    if constexpr (C.keeps_progress) return static_cast<int>(ptx::grid_size_anew());
    return static_cast<int>(ptx::grid_size()) / C.cluster;
  }

  /// The number of the tile that a CTA gets in a round. A head has `tiles` tiles; `all` is their total.
  static TANDEM_DEVICE int number_of(int round, int block, int blocks, int tiles, int all, bool pairs) {
    const bool singly = !paired || (sorted_end && round >= paired_rounds(tiles, all, blocks, pairs));
    if (!singly) return (round / 2 * blocks + block) * 2 + round % 2;
    return round * blocks + (runs_backwards(round) ? blocks - 1 - block : block);
  }
  /// How many rounds are assigned in pairs before the sorted end; without a sorted end, all.
  static TANDEM_DEVICE int paired_rounds(int tiles, int all, int blocks, bool pairs) {
    if (!pairs) return 0;
    return tiles < sorted_from_tiles ? all : max(all / (2 * blocks) - 1, 0) * 2;
  }
  static TANDEM_DEVICE bool runs_backwards(int round) {
    return ((latest_first && !C.mask.varlen) || sorted_end) && round % 2 == 1;
  }
  /// Which keys the i-th tile of a head has.
  static TANDEM_DEVICE int ith_tile(int i, int tiles) {
    if constexpr (paired) return i % 2 == 1 ? tiles - 1 - i / 2 : i / 2;
    return latest_first ? tiles - 1 - i : i;
  }

  struct HeadTile {
    int head;  ///< its number among those of all batch entries
    int n;
  };
  /// The head and keys of tile `number`, where all sequences have one length.
  static TANDEM_DEVICE HeadTile head_tile(int number, int tiles, int all, int blocks, bool pairs) {
    const int sorted_from = sorted_end ? paired_rounds(tiles, all, blocks, pairs) * blocks : all;
    if (number < sorted_from) {
      const int head = number / tiles;
      return {head, ith_tile(number - head * tiles, tiles)};
    }
    // What the pairs leave: tiles [first, end) of one head, whose pairs were assigned from the outside
    // inwards, and all tiles of the heads after it.
    const int partly = sorted_from / tiles;
    const int assigned = sorted_from - partly * tiles;
    const int whole = all / tiles - partly - 1;
    const int first = (assigned + 1) / 2;
    const int end = tiles - assigned / 2;
    int i = number - sorted_from;
    if (i < first * whole) return {partly + 1 + i % whole, i / whole};
    i -= first * whole;
    if (i < (end - first) * (whole + 1)) return {partly + i % (whole + 1), first + i / (whole + 1)};
    i -= (end - first) * (whole + 1);
    return {partly + 1 + i % whole, end + i / whole};
  }

  /// `head` counts those of all batch entries.
  static TANDEM_DEVICE void set_round(BackwardTile& t, int head, int tiles, int round, int blocks) {
    if constexpr (C.schedule.staggered) {
      t.tiles = tiles;
      t.round_first = max(0, round * blocks - head * tiles);
      t.round_last = min(tiles, (round + 1) * blocks - head * tiles) - 1;
    }
    if constexpr (!latest_first) return;
    t.round_last = runs_backwards(round) ? (head + 1) * tiles - 1 - round * blocks : -1;
    t.round_first = t.round_last - (blocks - 1);
  }

  /// Staggered: the tiles of a head begin at even distances. (The tiles of a round would be the better
  /// choice, but dK and dV are summed in the order of query blocks, and must not depend on the rest of the
  /// call.)
  static TANDEM_DEVICE int start_of(const BackwardTile& t) {
    return static_cast<int>(static_cast<i64>(t.n) * t.blocks.end / t.tiles);
  }
  /// How many of the head's tiles begin at query block m or earlier.
  static TANDEM_DEVICE int begun_at(const BackwardTile& t, int m) {
    return static_cast<int>(ceil_div(static_cast<i64>(m + 1) * t.tiles, static_cast<i64>(t.blocks.end)));
  }
  /// How many query blocks without a mask turned tiles take in an order of their own.
  static constexpr int turned_blocks = 16;
  /// The query block that passes by where the consumers count block m: another one without a mask.
  static TANDEM_DEVICE int turned(const BackwardTile& t, int m) {
    const int last = t.blocks.end - 2;  // the one after it may be cut by the sequence's end
    const int part = (last - m) & -turned_blocks;
    if (m > last || last - part - turned_blocks < t.blocks.inner_first) return m;
    return last - part - ((last - m + t.n) & (turned_blocks - 1));
  }
  /// The query block of step m of the loop over query blocks, as the loader and the dQ writers see it. The
  /// consumers simply count from the first to the last: staggered tiles have no mask, so consumers need not
  /// know which block they have.
  static TANDEM_DEVICE int passing(const BackwardTile& t, int m) {
    if constexpr (!C.schedule.staggered) return m;
    const int at = t.start + m;
    return at < t.blocks.end ? at : at - t.blocks.end;
  }

  /// The number of key tiles that add to the dQ of query block m before tile n does, in a fixed order: the
  /// semaphore's value at which tile n adds. Staggered, tiles of earlier rounds come first, then those that
  /// begin at m or earlier, the latest first, then the others.
  static TANDEM_DEVICE u32 additions_before(const BackwardTile& t, int m) {
    if constexpr (C.schedule.staggered) {
      const int in_round = t.round_last + 1 - t.round_first;
      const int begun = min(max(begun_at(t, m), t.round_first), t.round_last + 1) - t.round_first;
      const int ahead = begun - 1 - (t.n - t.round_first);
      return static_cast<u32>(t.round_first + (ahead < 0 ? ahead + in_round : ahead));
    }
    const auto keys =
        tile::BlockRange::of<C.tile_keys()>(t.visible, m * C.tiling.block_m, (m + 1) * C.tiling.block_m);
    if constexpr (!latest_first) return static_cast<u32>(t.n - keys.first);
    const int last = keys.end - 1;
    if (t.n > t.round_last) return static_cast<u32>(last - t.n);
    return static_cast<u32>(last - min(last, t.round_last) + t.n - max(keys.first, t.round_first));
  }
};

}  // namespace tandem
