#include "api/append_builder.hpp"

#include "api/operand_of.hpp"

namespace tandem {

using check::Argument;
using check::invalid;

void AppendBuilder::arguments_together() const {
  for (const Argument& a : {v_new_, v_cache_, q_out_, cu_seqlens_new_, seqused_new_, page_table_,
                            cache_batch_idx_, leftpad_k_, cache_seqlens_, slot_mapping_, k_scale_, v_scale_,
                            k_scale_cache_, v_scale_cache_, rotary_cos_, rotary_sin_, rotary_offsets_, q_}) {
    check::consistent(a);
  }
  if (slots()) {
    for (const Argument& a :
         {cu_seqlens_new_, seqused_new_, page_table_, cache_batch_idx_, leftpad_k_, cache_seqlens_}) {
      if (!a.given()) continue;
      invalid("{} and slot_mapping are both given; slot_mapping alone says where tokens go: leave {} out",
              a.name, a.name);
    }
  } else if (!cache_seqlens_.given()) {
    invalid("cache_seqlens is missing; pass a tensor of shape (batch), or pass slot_mapping");
  }
  if (page_table_.given() && cache_batch_idx_.given()) {
    invalid(
        "page_table and cache_batch_idx are both given; reorder the rows of page_table, and leave "
        "cache_batch_idx out");
  }
  if (v_new_.given() != v_cache_.given()) {
    invalid("{} is given without {}; pass both, or neither to append keys alone",
            (v_new_.given() ? v_new_ : v_cache_).name, (v_new_.given() ? v_cache_ : v_new_).name);
  }
}

void AppendBuilder::new_rows() {
  problem_.packed = slots() || cu_seqlens_new_.given();
  if (problem_.packed) {
    check::rank(k_new_, 3, "(total_new, heads_kv, head_dim), as cu_seqlens_new or slot_mapping is given");
  } else {
    check::rank(k_new_, 4,
                "(batch, seqlen_new, heads_kv, head_dim), as neither cu_seqlens_new nor "
                "slot_mapping is given");
  }
  check::extent(k_new_);
  const int d = problem_.packed ? 0 : 1;
  problem_.rows_new = k_new_.size(d);
  problem_.heads_kv = k_new_.size(d + 1);
  problem_.head_dim_k = k_new_.size(d + 2);
  if (slots()) {
    problem_.batch = 1;
  } else if (cu_seqlens_new_.given()) {
    check::rank(cu_seqlens_new_, 1, "(batch + 1)");
    check::extent(cu_seqlens_new_);
    if (cu_seqlens_new_.size(0) < 1) {
      invalid("cu_seqlens_new has no elements; it has batch + 1 offsets, the first of them 0");
    }
    problem_.batch = cu_seqlens_new_.size(0) - 1;
  } else {
    problem_.batch = k_new_.size(0);
  }
  if (problem_.head_dim_k < 1 || problem_.head_dim_k > max_row) {
    invalid("head_dim of k_new is {}; it must be from 1 to {}", problem_.head_dim_k, max_row);
  }
}

void AppendBuilder::cache_rows() {
  check::given(k_cache_, "(batch, seqlen, heads_kv, head_dim)");
  const bool paged = page_table_.given();
  check::rank(k_cache_, 4,
              paged ? "(pages, page_size, heads_kv, head_dim)" : "(batch, seqlen, heads_kv, head_dim)");
  check::extent(k_cache_);
  const bool by_batch = !paged && !slots() && !cache_batch_idx_.given();
  problem_.entries = k_cache_.size(0);
  problem_.entry_rows = k_cache_.size(1);
  check::shape(k_cache_,
               {by_batch ? problem_.batch : problem_.entries, problem_.entry_rows, problem_.heads_kv,
                problem_.head_dim_k},
               paged      ? "(pages, page_size, heads_kv of k_new, head_dim of k_new)"
               : by_batch ? "(batch of k_new, seqlen, heads_kv of k_new, head_dim of k_new)"
                          : "(entries, seqlen, heads_kv of k_new, head_dim of k_new)");
  if (paged) check::page_table(page_table_, k_cache_, problem_.batch, "(batch of k_new, max_pages)");
}

void AppendBuilder::values() {
  if (!v_new_.given()) return;
  check::rank(
      v_new_, k_new_.tensor.rank,
      symbols_of_rows("(total_new, heads_kv, head_dim_v)", "(batch, seqlen_new, heads_kv, head_dim_v)"));
  check::extent(v_new_);
  problem_.head_dim_v = v_new_.last_size();
  if (problem_.head_dim_v < 1 || problem_.head_dim_v > max_row) {
    invalid("head_dim of v_new is {}; it must be from 1 to {}", problem_.head_dim_v, max_row);
  }
  check::shape(v_new_, problem_.packed,
               {problem_.batch, problem_.rows_new, problem_.heads_kv, problem_.head_dim_v},
               {"(total_new of k_new, heads_kv of k_new, head_dim_v)",
                "(batch of k_new, seqlen_new of k_new, heads_kv of k_new, head_dim_v)"});
  check::shape(v_cache_, {problem_.entries, problem_.entry_rows, problem_.heads_kv, problem_.head_dim_v},
               "(entries of k_cache, seqlen of k_cache, heads_kv of k_new, head_dim_v of v_new)");
}

void AppendBuilder::sizes() {
  check::given(k_new_, "(batch, seqlen_new, heads_kv, head_dim)");
  arguments_together();
  new_rows();
  cache_rows();
  values();
}

void AppendBuilder::dtypes_and_device() {
  check::dtype(k_new_, {DType::f32, DType::f16, DType::bf16, DType::e4m3, DType::s8});
  if (v_new_.given()) check::same_dtype(v_new_, k_new_);
  check::dtype(k_cache_, {DType::f32, DType::f16, DType::bf16, DType::e4m3, DType::s8});
  if (is_eight_bit(k_cache_.tensor.dtype) && is_eight_bit(k_new_.tensor.dtype)) {
    check::same_dtype(k_cache_, k_new_);
  }
  if (v_cache_.given()) check::same_dtype(v_cache_, k_cache_);
  problem_.device = check::device(k_new_);
}

void AppendBuilder::common(const Argument& a) const {
  check::same_device(a, k_new_);
  check::extent(a);
  check::memory(a);
}

Operand AppendBuilder::rows(const Argument& a) const {
  common(a);
  check::last_dimension_contiguous(a);
  const int row = problem_.packed ? 0 : 1;
  return operand_of(a.tensor, row - 1, row, row + 1);
}

Operand AppendBuilder::cache(const Argument& a) const {
  common(a);
  check::last_dimension_contiguous(a);
  return operand_of(a.tensor, 0, 1, 2);
}

Lengths AppendBuilder::lengths(const Argument& a, std::int64_t count, const char* symbols) const {
  if (!a.given()) return {};
  check::shape(a, {count}, symbols);
  check::dtype(a, {DType::i32, DType::i64});
  common(a);
  return lengths_of(a.tensor);
}

void AppendBuilder::operands() {
  problem_.k_new = rows(k_new_);
  problem_.k_cache = cache(k_cache_);
  if (v_new_.given()) {
    problem_.v_new = rows(v_new_);
    problem_.v_cache = cache(v_cache_);
  }
  problem_.cu_seqlens_new = lengths(cu_seqlens_new_, problem_.batch + 1, "(batch + 1)");
  problem_.seqused_new = lengths(seqused_new_, problem_.batch, "(batch)");
  problem_.cache_seqlens = lengths(cache_seqlens_, problem_.batch, "(batch)");
  problem_.cache_batch_idx = lengths(cache_batch_idx_, problem_.batch, "(batch)");
  problem_.leftpad_k = lengths(leftpad_k_, problem_.batch, "(batch)");
  problem_.slot_mapping = lengths(slot_mapping_, problem_.rows_new, "(total_new of k_new)");
  if (!page_table_.given()) return;
  check::dtype(page_table_, {DType::i32, DType::i64});
  common(page_table_);
  problem_.pages = pages_of(page_table_.tensor, k_cache_.tensor);
}

namespace {

/// Rows that become codes have scales, and so have codes that become values, but theirs are given.
void rows_have_scales(const Argument& scales, const Argument& cache, const Argument& rows, bool given) {
  const bool to_codes = is_eight_bit(cache.tensor.dtype);
  if (to_codes != is_eight_bit(rows.tensor.dtype) && (to_codes || given)) return;
  invalid("{} is given but {} is {} and {} {}; scales are for rows that become e4m3 or s8{}: leave it out",
          scales.name, rows.name, name_of(rows.tensor.dtype), cache.name, name_of(cache.tensor.dtype),
          given ? ", or that were" : "");
}

}  // namespace

Scales AppendBuilder::scales_of(const Argument& a, const Argument& cache, const Argument& rows) const {
  if (!a.given()) return {};
  rows_have_scales(a, cache, rows, true);
  const bool may_be_by_row = !problem_.packed && is_eight_bit(rows.tensor.dtype);
  const char* const symbols = may_be_by_row ? "(1), (batch, heads_kv) or (batch, heads_kv, seqlen_new)"
                              : slots()     ? "(1) or (1, heads_kv)"
                                            : "(1) or (batch, heads_kv)";
  check::dtype(a, {DType::f32});
  Scales s;
  if (a.tensor.rank == 1) {
    check::shape(a, {1}, symbols);
  } else {
    if (may_be_by_row && a.tensor.rank == 3) {
      check::shape(a, {problem_.batch, problem_.heads_kv, problem_.rows_new}, symbols);
      s.group_stride = stride_of(a.tensor, 2);
    } else {
      check::shape(a, {problem_.batch, problem_.heads_kv}, symbols);
    }
    s.batch_stride = stride_of(a.tensor, 0);
    s.head_stride = stride_of(a.tensor, 1);
  }
  common(a);
  s.data = static_cast<const float*>(address_of(a.tensor));
  return s;
}

Operand AppendBuilder::scale_cache(const Argument& a, const Argument& given, const Argument& cache,
                                   const Argument& rows) const {
  if (!a.given()) return {};
  rows_have_scales(a, cache, rows, false);
  if (given.given()) {
    invalid("{} and {} are both given; scales are the caller's, or found and written: leave one of them out",
            given.name, a.name);
  }
  check::dtype(a, {DType::f32});
  check::shape(a, {problem_.entries, problem_.heads_kv, problem_.entry_rows},
               page_table_.given() ? "(pages of k_cache, heads_kv of k_new, page_size of k_cache)"
                                   : "(entries of k_cache, heads_kv of k_new, seqlen of k_cache)");
  common(a);
  return operand_of(a.tensor, 0, 2, 1);
}

void AppendBuilder::scales() {
  for (const Argument& a : {v_scale_, v_scale_cache_}) {
    if (a.given() && !v_cache_.given()) invalid("{} is given without v_cache; leave it out", a.name);
  }
  problem_.k_scale = scales_of(k_scale_, k_cache_, k_new_);
  problem_.v_scale = scales_of(v_scale_, v_cache_, v_new_);
  problem_.k_scale_cache = scale_cache(k_scale_cache_, k_scale_, k_cache_, k_new_);
  problem_.v_scale_cache = scale_cache(v_scale_cache_, v_scale_, v_cache_, v_new_);
}

Operand AppendBuilder::table(const Argument& a) const {
  check::shape(a, {problem_.positions, problem_.rotary_dim / 2}, "(positions, rotary_dim / 2)");
  if (a.tensor.dtype != DType::f32) check::same_dtype(a, k_new_);
  common(a);
  check::last_dimension_contiguous(a);
  return operand_of(a.tensor, -1, 0, -1);
}

void AppendBuilder::rotary() {
  check::together(rotary_cos_, rotary_sin_);
  if (!rotary_cos_.given()) {
    for (const Argument& a : {rotary_offsets_, q_, q_out_}) {
      if (a.given()) invalid("{} is given without rotary_cos and rotary_sin; leave it out", a.name);
    }
    return;
  }
  if (is_eight_bit(k_new_.tensor.dtype)) {
    invalid(
        "rotary_cos is given but k_new is {}; append rows in f16, bf16 or f32, or embed them before they "
        "are quantized",
        name_of(k_new_.tensor.dtype));
  }
  check::rank(rotary_cos_, 2, "(positions, rotary_dim / 2)");
  check::extent(rotary_cos_);
  problem_.positions = rotary_cos_.size(0);
  if (problem_.positions < 1) invalid("rotary_cos has no positions; it must have one at least");
  problem_.rotary_dim = check::rotary_dim(rotary_cos_, problem_.head_dim_k);
  problem_.interleaved = args_.rotary_interleaved;
  problem_.cos = table(rotary_cos_);
  problem_.sin = table(rotary_sin_);
  check::same_dtype(rotary_sin_, rotary_cos_);
  if (slots() && !rotary_offsets_.given()) {
    invalid(
        "rotary_offsets is missing; with slot_mapping it has the position of each token: pass a tensor of "
        "shape (total_new)");
  }
  problem_.rotary_offsets = slots() ? lengths(rotary_offsets_, problem_.rows_new, "(total_new of k_new)")
                                    : lengths(rotary_offsets_, problem_.batch, "(batch)");
}

void AppendBuilder::queries() {
  check::together(q_, q_out_);
  if (!q_.given()) return;
  check::rank(q_, k_new_.tensor.rank,
              symbols_of_rows("(total_new, heads_q, head_dim)", "(batch, seqlen_new, heads_q, head_dim)"));
  problem_.heads_q = q_.size(q_.tensor.rank - 2);
  for (const Argument* a : {&q_, &q_out_}) {
    check::shape(*a, problem_.packed,
                 {problem_.batch, problem_.rows_new, problem_.heads_q, problem_.head_dim_k},
                 {"(total_new of k_new, heads_q, head_dim of k_new)",
                  "(batch of k_new, seqlen_new of k_new, heads_q, head_dim of k_new)"});
    check::same_dtype(*a, k_new_);
  }
  problem_.q = rows(q_);
  problem_.q_out = rows(q_out_);
}

void AppendBuilder::outputs_and_contents() const {
  for (const Argument& a : {k_cache_, v_cache_, k_scale_cache_, v_scale_cache_, q_out_}) {
    if (a.given()) check::no_self_overlap(a);
  }
  check::separate(
      {k_cache_, v_cache_, k_scale_cache_, v_scale_cache_, q_out_},
      {k_new_, v_new_, cu_seqlens_new_, seqused_new_, page_table_, cache_batch_idx_, leftpad_k_,
       cache_seqlens_, slot_mapping_, k_scale_, v_scale_, rotary_cos_, rotary_sin_, rotary_offsets_, q_});
  if (args_.check) check::append_contents(problem_);
}

}  // namespace tandem
