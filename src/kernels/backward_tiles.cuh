// The tiles of the backward pass: which keys a block owns, which query blocks pass by, and where those lie in
// the workspace.
#pragma once

#include "kernels/config.hpp"
#include "kernels/tile/mask.cuh"
#include "kernels/tile/scheduler.cuh"

namespace tandem {

/// The first query block of a sequence in the workspace (see BackwardParams). `batch` may be one of the two
/// sequences of rows that belong to none, as RaggedBlocks numbers them.
template <BackwardConfig C>
TANDEM_DEVICE int first_query_block(const BackwardParams& p, int batch, int begin_q) {
  if (!p.packed_q) return batch * p.m_blocks;
  return begin_q / C.block_m + (batch == p.batch + 1 ? 0 : batch + 1);
}
/// A query block of a head in the workspace.
TANDEM_DEVICE i64 workspace_block(const BackwardParams& p, int head, int block) {
  return static_cast<i64>(head) * p.q_blocks + block;
}

/// Tile n of block_n keys, and the query blocks that see any of it.
struct BackwardTile {
  int n = 0;
  int head_kv = 0;
  int batch = 0;
  int begin_q = 0;
  int begin_k = 0;
  int end_k = 0;  ///< rows of k including those past their use; their gradients are written too
  int q_block = 0;
  tile::Visibility visible;
  tile::QueryBlockRange blocks;
};

/// The tiles of this thread block, one after another. A causal tile is the longer the earlier its keys are;
/// the longest come first, so that the last ones even out the blocks' ends. In a fixed order, though, the
/// latest keys of a causal query block add first: blocks that start together then start with a query block
/// each, and none waits. Dependencies go to lower tile numbers only, which is why waiting cannot deadlock.
template <BackwardConfig C>
struct BackwardTiles {
  static constexpr bool latest_first = C.causal && C.deterministic;

  const BackwardParams& p;
  tile::DealtTiles<C.causal && !C.ragged> dealt;
  tile::RaggedBlocks<C.block_n> ragged;

  TANDEM_DEVICE explicit BackwardTiles(const BackwardParams& params) : p(params) {}

  /// All lanes of a warp call.
  TANDEM_DEVICE bool next(BackwardTile& t) {
    // The shuffle lets the assembler know that the number is uniform (see forward.cuh).
    const int number = ptx::warp_uniform(dealt.next());
    int seqlen_q = p.rows_q;
    int seqlen_k = p.rows_k;
    if constexpr (C.ragged) {
      tile::RaggedBlock b;
      const tile::RaggedSide keys{p.cu_seqlens_k, p.seqused_k, p.rows_k, p.batch, p.heads_kv, p.packed_k};
      if (!ragged.locate(keys, number, b)) return false;
      t.n = latest_first ? b.blocks - 1 - b.block : b.block;
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
      if (!locate_dense(number, t)) return false;
      t.end_k = p.rows_k;
    }
    ptx::sync_warp();
    uniform(t.n, t.head_kv, t.batch, t.begin_q, t.begin_k, t.end_k, seqlen_q, seqlen_k);
    t.q_block = first_query_block<C>(p, t.batch, t.begin_q);
    t.visible = {seqlen_q, seqlen_k, C.local ? p.window_left : tile::Visibility::unbounded,
                 C.causal ? p.window_right : tile::Visibility::unbounded};
    t.blocks = tile::QueryBlockRange::of<C.block_m>(t.visible, t.n * C.block_n, (t.n + 1) * C.block_n);
    uniform(t.blocks.first, t.blocks.end, t.blocks.inner_first, t.blocks.inner_end);
    return true;
  }

  /// All lanes have the same values, but the assembler does not see it: with loop bounds that it takes for
  /// divergent it serialises the products (C7520) of every ragged causal Config.
  template <typename... Ints>
  static TANDEM_DEVICE void uniform(Ints&... values) {
    ((values = ptx::warp_uniform(values)), ...);
  }

  /// Heads come in sections whose Q, dO and dQ fit the L2 together; inside one, causal tiles of like length
  /// follow each other.
  TANDEM_DEVICE bool locate_dense(int tile, BackwardTile& t) {
    const int heads = p.heads_kv * p.batch;
    if (tile >= heads * p.n_blocks) return false;
    const int section = tile / (p.section_heads * p.n_blocks);
    const int within = tile - section * p.section_heads * p.n_blocks;
    const int section_heads = min(p.section_heads, heads - section * p.section_heads);
    const int head = C.causal ? within % section_heads : within / p.n_blocks;
    const int n = C.causal ? within / section_heads : within - head * p.n_blocks;
    t.n = latest_first ? p.n_blocks - 1 - n : n;
    const int batch_head = section * p.section_heads + head;
    t.batch = batch_head / p.heads_kv;
    t.head_kv = batch_head - t.batch * p.heads_kv;
    return true;
  }

  /// Key tiles that add to the dQ of query block m before tile n does.
  static TANDEM_DEVICE u32 turn_of(const BackwardTile& t, int m) {
    const auto keys = tile::BlockRange::of<C.block_n>(t.visible, m * C.block_m, (m + 1) * C.block_m);
    return static_cast<u32>(latest_first ? keys.end - 1 - t.n : t.n - keys.first);
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

template <BackwardConfig C>
TANDEM_DEVICE bool locate_rows(const BackwardParams& p, tile::RaggedBlocks<C.block_m>& ragged, int number,
                               BackwardRows& t) {
  int m = 0;
  if constexpr (C.ragged) {
    tile::RaggedBlock b;
    const tile::RaggedSide queries{p.cu_seqlens_q, p.seqused_q, p.rows_q, p.batch, p.heads_q, p.packed_q};
    if (!ragged.locate(queries, number, b)) return false;
    m = b.block;
    t.head = b.head;
    t.batch = b.batch;
    t.begin_q = b.rows.begin;
    t.seqlen_q = b.rows.used;
    t.end_q = b.rows.end - b.rows.begin;
  } else {
    const int heads = p.heads_q * p.batch;
    if (number >= heads * p.m_blocks) return false;
    const int batch_head = number / p.m_blocks;
    m = number - batch_head * p.m_blocks;
    t.batch = batch_head / p.heads_q;
    t.head = batch_head - t.batch * p.heads_q;
    t.seqlen_q = t.end_q = p.rows_q;
  }
  t.first = m * C.block_m;
  t.block = workspace_block(p, t.head, first_query_block<C>(p, t.batch, t.begin_q) + m);
  return true;
}

}  // namespace tandem
