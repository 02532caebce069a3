// The query blocks of the kernels before and after the main backward one.
#pragma once

#include "tile/backward_tiles.cuh"

namespace tandem {

/// A query block of one head, for the kernels before and after the main one.
struct BackwardRows {
  int head = 0;
  int batch = 0;
  int first = 0;  ///< row of the sequence
  int begin_q = 0;
  int seqlen_q = 0;
  int end_q = 0;
  i64 block = 0;  ///< in the workspace
};

/// Finds query block `number` for the kernels before and after the main one; false if it has no rows. The
/// blocks are ordered by sequence and then by head, as the main kernel's tiles are. Of a packed tensor there
/// are as many blocks as the heads have in the workspace, and sequence b has [first(b), first(b + 1)). The
/// sequence is found by search: a CTA has one block, so it would otherwise walk all sequences for it.
template <auto C>
TANDEM_DEVICE bool locate_rows(const BackwardParams& p, int number, BackwardRows& t) {
  int m = 0;
  if (C.mask.varlen && p.packed_q) {
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
    if constexpr (C.mask.varlen)
      t.seqlen_q = tile::sequence_rows(p.cu_seqlens_q, p.seqused_q, p.rows_q, t.batch).used;
  }
  t.first = m * C.tiling.block_m;
  t.block = workspace_block(p, t.head, first_query_block<C>(p, t.batch, t.begin_q) + m);
  return t.first < t.end_q;
}

}  // namespace tandem
