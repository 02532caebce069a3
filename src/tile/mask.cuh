// Which keys a query sees, block by block: blocks that no query sees are skipped, blocks that all queries see
// whole need no mask, and on the blocks between each score's key is compared with its query's bounds.
#pragma once

#include "config/types.hpp"
#include "tile/fragment.cuh"

namespace tandem::tile {

/// Query i of a sequence sees keys [i + shift - left, i + shift + right], clipped to [0, seqlen_k).
struct Visibility {
  int seqlen_q;
  int seqlen_k;
  int left;   ///< INT_MAX: unbounded
  int right;  ///< INT_MAX: unbounded

  TANDEM_DEVICE int first_key(int query) const {
    return left == unbounded ? 0 : max(0, query + seqlen_k - seqlen_q - left);
  }
  TANDEM_DEVICE int end_key(int query) const {
    return right == unbounded ? seqlen_k : min(seqlen_k, query + seqlen_k - seqlen_q + right + 1);
  }
  TANDEM_DEVICE bool sees_key(int query) const { return first_key(query) < end_key(query); }
  /// Queries [first_query, end_query) see `key`, provided that query and key are in use.
  TANDEM_DEVICE int first_query(int key) const {
    return right == unbounded ? 0 : max(0, key - seqlen_k + seqlen_q - right);
  }
  TANDEM_DEVICE int end_query(int key) const {
    return left == unbounded ? seqlen_q : min(seqlen_q, key - seqlen_k + seqlen_q + left + 1);
  }
  /// Queries before this one see no key at all.
  TANDEM_DEVICE int first_seeing() const { return first_query(0); }
  static constexpr int unbounded = 0x7fffffff;
};

/// Key blocks [first, end) that any of a group of queries sees, and [inner_first, inner_end) of them that all
/// queries see whole, so that no mask is needed.
struct BlockRange {
  int first;
  int end;
  int inner_first;
  int inner_end;

  template <int block_n>
  static TANDEM_DEVICE BlockRange of(const Visibility& v, int first_query, int end_query) {
    BlockRange r;
    const int last_query = min(end_query, v.seqlen_q) - 1;
    r.first = v.first_key(first_query) / block_n;
    r.end = last_query < first_query ? r.first : ceil_div(max(v.end_key(last_query), 0), block_n);
    r.inner_first = ceil_div(v.first_key(last_query), block_n);
    r.inner_end = max(v.end_key(first_query), 0) / block_n;
    return r;
  }
  TANDEM_DEVICE bool needs_mask(int block) const { return block >= inner_end || block < inner_first; }
};

/// Calls step(masked) for each key block from `block` down to the first of `all`, the tile's range. `own` is
/// the range of the caller's queries: blocks right of its inner ones are masked, and with a left window also
/// those left of them. All arguments are references: copies cost kernels of 256 columns 4 to 16 bytes of
/// local memory.
template <Mask M, typename Step>
TANDEM_DEVICE void walk_blocks(int& block, const BlockRange& all, const BlockRange& own, Step& step) {
  if constexpr (M.causal) {
    for (; block >= max(all.first, own.inner_end); --block) step(true);
  }
  for (; block >= max(all.first, own.inner_first); --block) step(false);
  if constexpr (M.local) {
    for (; block >= all.first; --block) step(true);
  }
}

/// Query blocks [first, end) that see any key of [first_key, end_key), and [inner_first, inner_end) of them
/// that see them all, so that no mask is needed. The counterpart of BlockRange: a key block is in a query
/// block's range if and only if the query block is in the key block's.
struct QueryBlockRange {
  int first;
  int end;
  int inner_first;
  int inner_end;

  template <int block_m>
  static TANDEM_DEVICE QueryBlockRange of(const Visibility& v, int first_key, int end_key) {
    QueryBlockRange r;
    const int last_key = min(end_key, v.seqlen_k) - 1;
    const int first_query = v.first_query(first_key);
    const int end_query = last_key < first_key ? 0 : v.end_query(last_key);
    r.first = first_query / block_m;
    r.end = first_query < end_query ? ceil_div(end_query, block_m) : r.first;
    const bool whole = end_key <= v.seqlen_k;
    r.inner_first = whole ? ceil_div(v.first_query(end_key - 1), block_m) : r.end;
    r.inner_end = v.left == Visibility::unbounded ? r.end : max(v.end_query(first_key), 0) / block_m;
    return r;
  }
};

/// How many of a thread's columns of a row lie below `end`: they are 0, 1, 8, 9, 16 and so on.
TANDEM_DEVICE int columns_below(int end) {
  return max(0, 2 * (end / 8) + min(end % 8, 2));
}

/// Sets scores of invisible keys to -inf. `query` and `key` are the sequence positions of the warpgroup's
/// tile origin, from which `position` counts queries (rows, or as tile/rows.cuh has them). Columns are bits
/// of a word, from which ptxas sets seven predicates at a time (R2P); written as comparisons, each column
/// would be compared with both edges.
template <int n, typename Position>
TANDEM_DEVICE void apply_mask(float (&s)[n], const Visibility& v, int query, int key,
                              const Position& position) {
  constexpr int bits = 24;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int first = v.first_key(query + position.row(h)) - key - position.first_col;
    const int end = v.end_key(query + position.row(h)) - key - position.first_col;
#pragma unroll
    for (int part = 0; part < n / 2; part += bits) {
      const auto below = [&](int edge) { return ~(~0U << min(max(columns_below(edge) - part, 0), bits)); };
      const u32 visible = below(end) & ~(v.left == Visibility::unbounded ? 0U : below(first));
#pragma unroll
      for (int k = 0; k < min(bits, n / 2 - part); ++k) {
        if ((visible >> k & 1U) == 0) s[4 * ((part + k) / 2) + 2 * h + k % 2] = -ptx::infinity();
      }
    }
  }
}

}  // namespace tandem::tile
