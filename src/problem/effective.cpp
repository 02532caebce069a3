#include "problem/effective.hpp"

namespace tandem {

// Query 0 sees rows_k - rows_q + window_right at most, the last one rows_k - 1 - window_left at least: a
// causal call with one query is a full one.
bool needs_right_mask(const Problem& p) {
  return p.window_right >= 0 && p.window_right < p.rows_q - 1;
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
  if (!alone || p.group() == 1 || p.sink != nullptr) return;
  p.rows_q = p.group();
  p.heads_q = p.heads_kv;
  for (Operand* o : {&p.q, &p.out, &p.lse}) {
    o->row_stride = o->head_stride;
    o->head_stride *= p.rows_q;
  }
  p.window_right = -1;  // the one query sees every key
}

}  // namespace tandem
