#include "problem/effective.hpp"

#include <algorithm>

namespace tandem {

// Query 0 sees rows_k - rows_q + window_right at most, the last one rows_k - 1 - window_left at least: a
// causal call with one query is a full one.
bool needs_right_mask(const Problem& p) {
  return p.causal_by_sequence.given() || (p.window_right >= 0 && p.window_right < p.rows_q - 1);
}
bool needs_left_mask(const Problem& p) {
  return p.window_left >= 0 && p.window_left < p.rows_k - 1;
}
bool has_lengths(const Problem& p) {
  return p.cu_seqlens_q.given() || p.cu_seqlens_k.given() || p.seqused_q.given() || p.seqused_k.given() ||
         p.of_cache();
}

void fold_heads_into_rows(Problem& p) {
  const bool alone = p.rows_q == 1 && !p.packed_q && !p.seqused_q.given() && !needs_left_mask(p);
  if (!alone || p.group() == 1 || p.sink != nullptr || p.has_function()) return;
  if (has_wide_heads(p) && p.group() > 64) return;
  p.rows_q = p.group();
  p.heads_q = p.heads_kv;
  for (Operand* o : {&p.q, &p.out, &p.lse, &p.max_logits, &p.gate}) {
    o->row_stride = o->head_stride;
    o->head_stride *= p.rows_q;
  }
  p.window_right = -1;  // the one query sees every key
  p.causal_by_sequence = {};
}

bool has_wide_heads(const Problem& p) {
  return p.head_dim_qk > max_gpu_head_dim || p.head_dim_v > max_gpu_head_dim;
}

bool has_values_in_keys(const Problem& p) {
  return same_address(p.v.data, p.k.data) && p.v.dtype == p.k.dtype && p.head_dim_v <= p.head_dim_qk &&
         p.v.row_stride == p.k.row_stride && p.v.head_stride == p.k.head_stride &&
         p.v.batch_stride == p.k.batch_stride;
}

std::int64_t queries_of(const Problem& p) {
  const std::int64_t batch = std::max<std::int64_t>(p.batch, 1);
  return p.packed_q ? (p.rows_q + batch - 1) / batch : p.rows_q;
}

HeadRows best_head_rows(const Problem& p, std::int64_t tile_rows) {
  const auto ceil_div = [](std::int64_t n, std::int64_t size) { return (n + size - 1) / size; };
  const std::int64_t queries = std::max<std::int64_t>(queries_of(p), 1);
  HeadRows best{.queries = tile_rows};
  std::int64_t fewest = p.group() * ceil_div(queries, best.queries);
  // `parts` of a group are as many tiles at least.
  for (std::int64_t parts = ceil_div(p.group(), tile_rows); parts < std::min(p.group(), fewest); ++parts) {
    const std::int64_t heads = ceil_div(p.group(), parts);
    const HeadRows rows{.heads = heads, .queries = tile_rows / heads};
    const std::int64_t tiles = ceil_div(p.group(), heads) * ceil_div(queries, rows.queries);
    if (tiles >= fewest) continue;
    best = rows;
    fewest = tiles;
  }
  return best;
}

}  // namespace tandem
