// k and v as a cache: pages, entries chosen by index, padding on the left; and keys chosen by number.
#include "api/problem_builder.hpp"

namespace tandem {

using check::invalid;

void ProblemBuilder::cache_arguments() const {
  for (const Argument& a : {page_table_, leftpad_k_, cache_batch_idx_}) {
    check::consistent(a);
    if (!a.given()) continue;
    if (p_.pass == Pass::backward) {
      invalid("{} is given to backward; a cache has no gradients: pass k and v as they were computed",
              a.name);
    }
    if (cu_seqlens_k_.given()) {
      invalid(
          "{} and cu_seqlens_k are both given; the lengths of a cache's sequences are seqused_k: leave "
          "cu_seqlens_k out",
          a.name);
    }
    if (q_.tensor.dtype == DType::s8) {
      invalid("{} is given with q in s8; pass q in f16, bf16 or f32, beside which k and v may stay in s8",
              a.name);
    }
    if (options_.precision != Precision::exact) {
      invalid(
          "{} is given with an 8-bit precision; leave the precision exact, which takes k and v of a cache in "
          "8 bits, and in e4m3 q too",
          a.name);
    }
  }
  if (page_table_.given() && cache_batch_idx_.given()) {
    invalid(
        "page_table and cache_batch_idx are both given; reorder the rows of page_table, and leave "
        "cache_batch_idx out");
  }
}

void ProblemBuilder::shapes_of_keys() const {
  if (page_table_.given()) {
    check::shape(k_, {k_.size(0), k_.size(1), p_.heads_kv, p_.head_dim_qk},
                 "(pages, page_size, heads_kv, head_dim of q)");
    check::shape(v_, {k_.size(0), k_.size(1), p_.heads_kv, p_.head_dim_v},
                 "(pages of k, page_size of k, heads_kv of k, head_dim_v)");
  } else if (p_.packed_k) {
    check::shape(k_, {p_.rows_k, p_.heads_kv, p_.head_dim_qk}, "(total_k, heads_kv, head_dim of q)");
    check::shape(v_, {p_.rows_k, p_.heads_kv, p_.head_dim_v}, "(total_k of k, heads_kv of k, head_dim_v)");
  } else if (cache_batch_idx_.given()) {
    check::shape(k_, {k_.size(0), p_.rows_k, p_.heads_kv, p_.head_dim_qk},
                 "(entries of the cache, seqlen_k, heads_kv, head_dim of q)");
    check::shape(v_, {k_.size(0), p_.rows_k, p_.heads_kv, p_.head_dim_v},
                 "(entries of k, seqlen_k of k, heads_kv of k, head_dim_v)");
  } else {
    check::shape(k_, {p_.batch, p_.rows_k, p_.heads_kv, p_.head_dim_qk},
                 "(batch of q, seqlen_k, heads_kv, head_dim of q)");
    check::shape(v_, {p_.batch, p_.rows_k, p_.heads_kv, p_.head_dim_v},
                 "(batch of q, seqlen_k of k, heads_kv of k, head_dim_v)");
  }
}

Pages ProblemBuilder::pages() {
  if (!page_table_.given()) return {};
  check::dtype(page_table_, {DType::i32, DType::i64});
  common(page_table_);
  return pages_of(page_table_.tensor, k_.tensor);
}

void ProblemBuilder::indices_alone() const {
  const auto refuse = [](const char* what, const char* instead) {
    fail(Status::unsupported, "indices is given with {}, which does not take it; {}", what, instead);
  };
  if (options_.precision != Precision::exact) {
    refuse("an 8-bit precision", "leave the precision exact, which takes k and v in 8 bits");
  }
  if (options_.split_size != 0 && p_.pass == Pass::forward) {
    refuse("split_size", "leave it out: a query's bits depend on nothing but its keys");
  }
  if (in_.score_function != nullptr) refuse("a score function", "leave it out");
  if (in_.mask_function != nullptr) refuse("a mask function", "leave out of indices what it hides");
  if (options_.dropout_p > 0.0F) refuse("dropout_p", "leave it out");
}

Indices ProblemBuilder::indices() {
  check::consistent(indices_);
  check::consistent(topk_length_);
  if (!indices_.given()) {
    if (topk_length_.given()) invalid("topk_length is given without indices; pass both, or neither");
    return {};
  }
  indices_alone();
  const int row = p_.packed_q ? 0 : 1;
  const bool by_head = indices_.tensor.rank == row + 3;
  const std::int64_t count = indices_.tensor.rank > 0 ? indices_.last_size() : 0;
  if (by_head) {
    check::shape(indices_, p_.packed_q, {p_.batch, p_.rows_q, p_.heads_kv, count},
                 {"(total_q, heads_kv, topk)", "(batch, seqlen_q, heads_kv, topk)"});
  } else {
    check::shape(indices_, p_.packed_q, {p_.batch, p_.rows_q, count},
                 {"(total_q, topk)", "(batch, seqlen_q, topk)"});
  }
  check::dtype(indices_, {DType::i32, DType::i64});
  common(indices_);
  Indices chosen{.numbers = operand_of(indices_.tensor, row - 1, row, by_head ? row + 1 : -1),
                 .stride = stride_of(indices_.tensor, static_cast<std::size_t>(indices_.tensor.rank - 1)),
                 .count = count,
                 .lengths = {}};
  if (!topk_length_.given()) return chosen;
  check::shape(topk_length_, p_.packed_q, {p_.batch, p_.rows_q}, {"(total_q)", "(batch, seqlen_q)"});
  check::dtype(topk_length_, {DType::i32, DType::i64});
  common(topk_length_);
  chosen.lengths = operand_of(topk_length_.tensor, row - 1, row, -1);
  return chosen;
}

}  // namespace tandem
