// Batch, rows, heads and head dimensions, and the shapes of q, k and v.
#include "api/problem_builder.hpp"

namespace tandem {

using check::invalid;

void ProblemBuilder::sizes() {
  check::given(q_, "(batch, seqlen_q, heads_q, head_dim)");
  check::given(k_, "(batch, seqlen_k, heads_kv, head_dim)");
  check::given(v_, "(batch, seqlen_k, heads_kv, head_dim_v)");
  for (const Argument& a : {cu_seqlens_q_, cu_seqlens_k_}) check::consistent(a);
  p_.packed_q = cu_seqlens_q_.given();
  p_.packed_k = cu_seqlens_k_.given();
  cache_arguments();
  if (p_.packed_q) {
    check::rank(q_, 3, "(total_q, heads_q, head_dim), since cu_seqlens_q is given");
  } else {
    check::rank(q_, 4,
                "(batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with cu_seqlens_q");
  }
  if (p_.packed_k) {
    check::rank(k_, 3, "(total_k, heads_kv, head_dim), since cu_seqlens_k is given");
  } else {
    check::rank(
        k_, 4,
        page_table_.given()
            ? "(pages, page_size, heads_kv, head_dim), since page_table is given"
            : "(batch, seqlen_k, heads_kv, head_dim), or (total_k, heads_kv, head_dim) with cu_seqlens_k");
  }
  check::rank(v_, k_.tensor.rank,
              p_.packed_k ? "(total_k, heads_kv, head_dim_v)" : "(batch, seqlen_k, heads_kv, head_dim_v)");
  for (const Argument& a : {q_, k_, v_}) check::extent(a);

  const int dim_q = p_.packed_q ? 0 : 1;  // where the rows are
  const int dim_k = p_.packed_k ? 0 : 1;
  p_.batch = p_.packed_q ? sequences(cu_seqlens_q_) : q_.size(0);
  p_.rows_q = q_.size(dim_q);
  p_.heads_q = q_.size(dim_q + 1);
  p_.head_dim_qk = q_.size(dim_q + 2);
  p_.rows_k = page_table_.given() ? check::page_table(page_table_, k_, p_.batch, "(batch of q, max_pages)")
                                  : k_.size(dim_k);
  p_.heads_kv = k_.size(dim_k + 1);
  p_.head_dim_v = v_.last_size();
  shapes_of_keys();
  heads();
  head_dim("head_dim", p_.head_dim_qk);
  head_dim("head_dim_v", p_.head_dim_v);
}

std::int64_t ProblemBuilder::sequences(const Argument& cu_seqlens) {
  check::rank(cu_seqlens, 1, "(batch + 1)");
  if (cu_seqlens.size(0) < 1) {
    invalid("{} has shape {}; it needs batch + 1 elements, one at least", cu_seqlens.name,
            check::shape_of(cu_seqlens.tensor));
  }
  return cu_seqlens.size(0) - 1;
}

void ProblemBuilder::heads() const {
  if (p_.heads_q < 1) invalid("q has {} heads; at least one is needed", p_.heads_q);
  if (p_.heads_kv < 1) invalid("k has {} heads; at least one is needed", p_.heads_kv);
  if (p_.heads_q % p_.heads_kv != 0) {
    invalid("heads_q {} is not a multiple of heads_kv {}; each kv head serves the same number of query heads",
            p_.heads_q, p_.heads_kv);
  }
}

void ProblemBuilder::head_dim(const char* name, std::int64_t d) const {
  if (d < 1) invalid("{} is {}; it must be from 1 to {}", name, d, max_head_dim);
  if (d > max_head_dim) invalid("{} {} is above {}; split it over more heads", name, d, max_head_dim);
}

}  // namespace tandem
