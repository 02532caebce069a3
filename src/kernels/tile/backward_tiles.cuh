// The tiles of the backward pass: which keys a block owns, which query blocks pass by, and where those lie in
// the workspace.
#pragma once

#include "kernels/config/backward.hpp"
#include "kernels/tile/mask.cuh"
#include "kernels/tile/scheduler.cuh"

namespace tandem {

/// The first query block of a sequence in the workspace (see BackwardParams). `batch` may be one of the two
/// sequences of rows that belong to none, as VarlenBlocks numbers them.
template <BackwardConfig C>
TANDEM_DEVICE int first_query_block(const BackwardParams& p, int batch, int begin_q) {
  if (!p.packed_q) return batch * p.m_blocks;
  return begin_q / C.block_m + (batch == p.batch + 1 ? 0 : batch + 1);
}
/// A query block of a head in the workspace.
TANDEM_DEVICE i64 workspace_block(const BackwardParams& p, int head, int block) {
  return static_cast<i64>(head) * p.q_blocks + block;
}

/// The counter of a KV head's tiles that have been added up.
TANDEM_DEVICE u32* tiles_added(const BackwardParams& p, int batch, int head_kv) {
  return p.tiles_added + batch * p.heads_kv + head_kv;
}

/// Tile n of a head's keys, and the query blocks that see any of it.
struct BackwardTile {
  int n = 0;
  int first_key = 0;  ///< of this block's keys in the sequence
  int head_kv = 0;
  int batch = 0;
  int begin_q = 0;
  int begin_k = 0;
  int end_k = 0;  ///< rows of k including those past their use; their gradients are written too
  int q_block = 0;
  /// Rotated: the head's tiles of this round. In a fixed causal order, of a round that was dealt backwards:
  /// the head's tiles that it may have, which add the earliest first. Otherwise none.
  int round_first = 0;
  int round_last = -1;
  int tiles = 0;  ///< rotated: the head's
  int start = 0;  ///< the query block that it begins with
  tile::Visibility visible;
  tile::QueryBlockRange blocks;
};

/// The tiles of this thread block, one after another; those of a head follow each other, so that the blocks
/// that share its Q, dO and dQ in the L2 run at once.
///
/// Masked tiles differ in work: a causal one is the longer the earlier its keys are. They are dealt in pairs,
/// the longest of a head with its shortest and so on inwards, so that every pair is as much work as any
/// other. (Dealt singly, 132 blocks of 128 tiles a head keep drawing the same lengths: 0.59 of the work
/// evened out.) Of wide heads with many tiles, the last two to four rounds of causal ones are dealt singly,
/// the longest of all heads that are left first, forwards and backwards in turn: a last round of pairs that
/// is not full costs 3 % of 2048 tiles on 132 blocks, one of the shortest tiles 1 %.
///
/// Rotated, the tiles of a head begin with query blocks of their own and wrap round: additions to
/// dQ do not meet. In a fixed order a tile's i-th block then waits only for tiles that come there as their
/// i-th or an earlier one, and for earlier rounds: nobody waits for long, and not in a circle.
///
/// In a fixed order the latest keys of a causal query block add first: blocks that start together then start
/// with a query block each, and none waits. Every second round is dealt backwards, which backward_grid makes
/// even. Its blocks start late by the work that they had in the round before, so that all reach a query block
/// at once; the earliest keys add first then, since theirs start first. (Latest first, each had to wait for
/// all others: 0.73 of the speed in any order at head dimension 64, by the model above 0.75, and 0.93 so.)
/// A tile waits for earlier rounds, and in its own for what the same order puts before it at every query
/// block: the blocks, all of them resident, cannot wait for each other in a circle.
template <BackwardConfig C>
struct BackwardTiles {
  static constexpr bool paired = (C.causal || C.local) && !C.deterministic;
  /// As measured: head dimension 64 loses by it 1 %, and so do heads of fewer tiles.
  static constexpr bool sorted_end = paired && C.causal && !C.local && !C.varlen && C.head_dim_qk >= 128;
  static constexpr int sorted_from_tiles = 32;
  static constexpr bool latest_first = C.causal && C.deterministic;
  static_assert(!C.rotated || !(C.causal || C.local || C.varlen));

  const BackwardParams& p;
  int round = 0;
  tile::VarlenBlocks<C.tile_keys()> varlen;

  TANDEM_DEVICE explicit BackwardTiles(const BackwardParams& params) : p(params) {}

  /// All lanes of a warp call.
  TANDEM_DEVICE bool next(BackwardTile& t) {
    // The shuffle lets ptxas know that the number is uniform (see forward.cuh).
    const int all = p.heads_kv * p.batch * p.n_blocks;  // where sequences are of one length
    const int number = ptx::warp_uniform(
        number_of(round++, static_cast<int>(ptx::block_index()) / C.cluster, clusters(), p.n_blocks, all));
    int seqlen_q = p.rows_q;
    int seqlen_k = p.rows_k;
    if constexpr (C.varlen) {
      tile::VarlenBlock b;
      const tile::VarlenSide keys{p.cu_seqlens_k, p.seqused_k, p.rows_k, p.batch, p.heads_kv, p.packed_k};
      if (!varlen.locate(keys, number, b)) return false;
      t.n = place(b.block, b.blocks);
      t.head_kv = b.head;
      t.batch = b.batch;
      t.begin_k = b.rows.begin;
      t.end_k = b.rows.end - b.rows.begin;
      seqlen_k = b.rows.used;
      const tile::SequenceRows q =
          tile::other_side({p.cu_seqlens_q, p.seqused_q, p.rows_q, p.batch, p.heads_q, p.packed_q}, b.batch);
      t.begin_q = q.begin;
      seqlen_q = q.used;
    } else {
      if (number >= all) return false;
      const HeadTile at = place_of(number, p.n_blocks, all, clusters());
      t.n = at.n;
      t.batch = at.head / p.heads_kv;
      t.head_kv = at.head - t.batch * p.heads_kv;
      t.end_k = p.rows_k;
      set_round(t, at.head, p.n_blocks, round - 1, clusters());
    }
    ptx::sync_warp();
    uniform(t.n, t.head_kv, t.batch, t.begin_q, t.begin_k, t.end_k, seqlen_q, seqlen_k);
    t.q_block = first_query_block<C>(p, t.batch, t.begin_q);
    t.visible = {seqlen_q, seqlen_k, C.local ? p.window_left : tile::Visibility::unbounded,
                 C.causal ? p.window_right : tile::Visibility::unbounded};
    t.first_key = t.n * C.tile_keys() + rank() * C.block_n;
    t.blocks =
        tile::QueryBlockRange::of<C.block_m>(t.visible, t.n * C.tile_keys(), (t.n + 1) * C.tile_keys());
    uniform(t.blocks.first, t.blocks.end, t.blocks.inner_first, t.blocks.inner_end);
    if constexpr (C.rotated) t.start = start_of(t);
    return true;
  }

  /// The block's place in its cluster.
  static TANDEM_DEVICE int rank() {
    if constexpr (C.cluster == 1) return 0;
    return static_cast<int>(ptx::block_index()) % C.cluster;
  }
  /// From this block's first key to the other's.
  static TANDEM_DEVICE int other_keys() { return rank() == 0 ? C.block_n : -C.block_n; }
  static TANDEM_DEVICE int clusters() { return static_cast<int>(ptx::grid_size()) / C.cluster; }

  /// All lanes have the same values, but ptxas does not see it: with loop bounds that it takes for
  /// divergent it serialises the products (C7520) of every varlen causal Config.
  template <typename... Ints>
  static TANDEM_DEVICE void uniform(Ints&... values) {
    ((values = ptx::warp_uniform(values)), ...);
  }

  /// The number of the tile that a block draws in a round; a head has `tiles`, and `all` there are.
  static TANDEM_DEVICE int number_of(int round, int block, int blocks, int tiles, int all) {
    const bool singly = !paired || (sorted_end && round >= paired_rounds(tiles, all, blocks));
    if (!singly) return (round / 2 * blocks + block) * 2 + round % 2;
    return round * blocks + (dealt_backwards(round) ? blocks - 1 - block : block);
  }
  /// The rounds that are dealt in pairs before the sorted end, or all.
  static TANDEM_DEVICE int paired_rounds(int tiles, int all, int blocks) {
    return tiles < sorted_from_tiles ? all : max(all / (2 * blocks) - 1, 0) * 2;
  }
  static TANDEM_DEVICE bool dealt_backwards(int round) {
    return ((latest_first && !C.varlen) || sorted_end) && round % 2 == 1;
  }
  /// Which of its head's tiles the i-th is.
  static TANDEM_DEVICE int place(int i, int tiles) {
    if constexpr (paired) return i % 2 == 1 ? tiles - 1 - i / 2 : i / 2;
    return latest_first ? tiles - 1 - i : i;
  }

  struct HeadTile {
    int head;  ///< of all batch entries
    int n;
  };
  /// Tile `number` of `all`, where sequences are of one length.
  static TANDEM_DEVICE HeadTile place_of(int number, int tiles, int all, int blocks) {
    const int sorted_from = sorted_end ? paired_rounds(tiles, all, blocks) * blocks : all;
    if (number < sorted_from) {
      const int head = number / tiles;
      return {head, place(number - head * tiles, tiles)};
    }
    // What pairs have left: of the head that is dealt in part, from the outside inwards, tiles [first, end),
    // and all tiles of the whole heads after it.
    const int partly = sorted_from / tiles;
    const int dealt = sorted_from - partly * tiles;
    const int whole = all / tiles - partly - 1;
    const int first = (dealt + 1) / 2;
    const int end = tiles - dealt / 2;
    int i = number - sorted_from;
    if (i < first * whole) return {partly + 1 + i % whole, i / whole};
    i -= first * whole;
    if (i < (end - first) * (whole + 1)) return {partly + i % (whole + 1), first + i / (whole + 1)};
    i -= (end - first) * (whole + 1);
    return {partly + 1 + i % whole, end + i / whole};
  }

  /// `head` counts those of all batch entries.
  static TANDEM_DEVICE void set_round(BackwardTile& t, int head, int tiles, int round, int blocks) {
    if constexpr (C.rotated) {
      t.tiles = tiles;
      t.round_first = max(0, round * blocks - head * tiles);
      t.round_last = min(tiles, (round + 1) * blocks - head * tiles) - 1;
    }
    if constexpr (!latest_first) return;
    t.round_last = dealt_backwards(round) ? (head + 1) * tiles - 1 - round * blocks : -1;
    t.round_first = t.round_last - (blocks - 1);
  }

  /// Rotated: the tiles of a head begin at even distances. (Not those of a round: sums in dK and dV follow
  /// the order of query blocks, and are not to depend on what else the call has.)
  static TANDEM_DEVICE int start_of(const BackwardTile& t) {
    return static_cast<int>(static_cast<i64>(t.n) * t.blocks.end / t.tiles);
  }
  /// How many of the head's tiles begin at query block m or before.
  static TANDEM_DEVICE int begun_at(const BackwardTile& t, int m) {
    return static_cast<int>(ceil_div(static_cast<i64>(m + 1) * t.tiles, static_cast<i64>(t.blocks.end)));
  }
  /// The query block that passes by as number m, as the loader and the adders see it. Consumers count from
  /// the first to the end: without a mask they need not know which is which, and their loops stay as they
  /// are.
  static TANDEM_DEVICE int passing(const BackwardTile& t, int m) {
    if constexpr (!C.rotated) return m;
    const int at = t.start + m;
    return at < t.blocks.end ? at : at - t.blocks.end;
  }

  /// Key tiles that add to the dQ of query block m before tile n does. Rotated: those of earlier rounds, then
  /// those that begin at m or before, the latest first, then the others.
  static TANDEM_DEVICE u32 turn_of(const BackwardTile& t, int m) {
    if constexpr (C.rotated) {
      const int together = t.round_last + 1 - t.round_first;
      const int begun = min(max(begun_at(t, m), t.round_first), t.round_last + 1) - t.round_first;
      const int turn = begun - 1 - (t.n - t.round_first);
      return static_cast<u32>(t.round_first + (turn < 0 ? turn + together : turn));
    }
    const auto keys = tile::BlockRange::of<C.tile_keys()>(t.visible, m * C.block_m, (m + 1) * C.block_m);
    if constexpr (!latest_first) return static_cast<u32>(t.n - keys.first);
    const int last = keys.end - 1;
    if (t.n > t.round_last) return static_cast<u32>(last - t.n);
    return static_cast<u32>(last - min(last, t.round_last) + t.n - max(keys.first, t.round_first));
  }
};

/// Query blocks of one head, as the kernels before and after the main one walk them.
struct BackwardRows {
  int head = 0;
  int batch = 0;
  int first = 0;  ///< row of the sequence
  int begin_q = 0;
  int seqlen_q = 0;
  int end_q = 0;
  i64 block = 0;  ///< in the workspace
};

/// Block `number` of the kernels before and after the main one; false where it has no rows. They follow each
/// other sequence by sequence and head by head, as the main kernel's tiles do. Of packed sequences there are
/// as many blocks as a head has in the workspace, of which each sequence has [F(b), F(b + 1)): it is searched
/// for, since every block begins anew, and would walk a thousand sequences.
template <BackwardConfig C>
TANDEM_DEVICE bool locate_rows(const BackwardParams& p, int number, BackwardRows& t) {
  int m = 0;
  if (C.varlen && p.packed_q) {
    const auto begin = [&](int b) { return tile::clamp_to(tile::length_at(p.cu_seqlens_q, b), 0, p.rows_q); };
    const auto first = [&](int b) { return p.heads_q * first_query_block<C>(p, b, begin(b)); };
    const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
    t.batch = tile::last_not_past(lane, p.batch + 1, number, first);
    int from = first(t.batch);
    int to = p.heads_q * p.q_blocks;
    tile::SequenceRows rows{begin(t.batch), 0, p.rows_q};  // those past the last sequence
    if (number < from) {                                   // those before the first
      rows = {0, 0, rows.begin};
      to = from;
      from = 0;
      t.batch = p.batch + 1;
    } else if (t.batch < p.batch) {
      rows = tile::sequence_rows(p.cu_seqlens_q, p.seqused_q, p.rows_q, t.batch);
      to = first(t.batch + 1);
    }
    if (number >= to) return false;  // offsets that descend, which are no sequences
    const int of_head = (to - from) / p.heads_q;
    t.head = (number - from) / of_head;
    m = number - from - t.head * of_head;
    t.begin_q = rows.begin;
    t.seqlen_q = rows.used;
    t.end_q = rows.end - rows.begin;
  } else {
    const int heads = p.heads_q * p.batch;
    if (number >= heads * p.m_blocks) return false;
    const int batch_head = number / p.m_blocks;
    m = number - batch_head * p.m_blocks;
    t.batch = batch_head / p.heads_q;
    t.head = batch_head - t.batch * p.heads_q;
    t.seqlen_q = t.end_q = p.rows_q;
    if constexpr (C.varlen)
      t.seqlen_q = tile::sequence_rows(p.cu_seqlens_q, p.seqused_q, p.rows_q, t.batch).used;
  }
  t.first = m * C.block_m;
  t.block = workspace_block(p, t.head, first_query_block<C>(p, t.batch, t.begin_q) + m);
  return t.first < t.end_q;
}

}  // namespace tandem
