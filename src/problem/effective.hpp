// The problem that a kernel sees: which masks it needs, and which heads are rows of one tile.
#pragma once

#include <cstddef>

#include "problem/problem.hpp"

namespace tandem {

/// The address of tensors that were given without one: empty tensors, tensors that are only described, and
/// those that the workspace will hold. Never read.
alignas(256) inline constexpr std::byte nowhere{};

/// Whether two tensors begin at one address, which those without one are not known to do.
inline bool same_address(const void* a, const void* b) {
  return a == b && a != &nowhere;
}

/// Whether a bound of the window, or lengths by sequence, concern any query of the problem: a bound that not
/// even the first query (on the right) or the last (on the left) feels needs no mask.
bool needs_right_mask(const Problem& problem);
bool needs_left_mask(const Problem& problem);
bool has_lengths(const Problem& problem);

/// Makes query heads rows, where there is one query a sequence and no mask, sink or function tells heads from
/// rows: a
/// step of generation then reads the keys that heads share once, not once a head. Leaves other problems as
/// they are, and wide heads that would be more rows than a tile has.
void fold_heads_into_rows(Problem& problem);

/// Heads wider than the products of one warpgroup: the kernel `forward_wide` takes them.
bool has_wide_heads(const Problem& problem);
/// V is the first columns of K, in memory.
bool has_values_in_keys(const Problem& problem);

/// Queries of a sequence: the mean, rounded up, where they are packed.
std::int64_t queries_of(const Problem& problem);

/// How query heads that share keys divide the rows of a tile: `heads` of each of `queries` queries.
struct HeadRows {
  std::int64_t heads = 1;
  std::int64_t queries = 64;

  /// Tiles that all heads of a query take: several of a group that has more heads.
  [[nodiscard]] std::int64_t tile_heads(const Problem& p) const {
    return p.heads_kv * ((p.group() + heads - 1) / heads);
  }
};

/// The division with the fewest tiles of `rows` rows for queries_of(problem) queries, and of those the one
/// with the most heads, which reads keys least often.
HeadRows best_head_rows(const Problem& problem, std::int64_t rows = 64);

}  // namespace tandem
