// The scales of 8-bit tensors.
#include "api/problem_builder.hpp"

#include <algorithm>

namespace tandem {
namespace {

using check::Argument;

constexpr const char* by_block_or_row =
    "(1), (batch, heads), (batch, heads, ceil(seqlen / 128)) or (batch, heads, seqlen)";

bool has_shape(const Argument& a, std::initializer_list<std::int64_t> shape) {
  return a.tensor.rank == static_cast<int>(shape.size()) &&
         std::equal(shape.begin(), shape.end(), a.tensor.shape.begin());
}

}  // namespace

using check::invalid;

Scales ProblemBuilder::scales(const Argument& a, const Argument& of, bool packed, std::int64_t heads,
                              std::int64_t rows) {
  check::consistent(a);
  if (!a.given()) return {};
  if (!is_eight_bit(of.tensor.dtype)) {
    invalid("{} is given but {} is {}; scales are for 8-bit tensors, leave it out", a.name, of.name,
            name_of(of.tensor.dtype));
  }
  check::dtype(a, {DType::f32});
  const bool exact = options_.precision == Precision::exact && (!mixed() || is_cache());
  const bool beside_rows = exact && !packed && &of != &q_;
  const bool coarse = exact && !beside_rows;
  const char* const symbols = coarse                ? "(1) or (batch, heads_kv)"
                              : packed              ? "(1), (batch, heads) or (heads, total)"
                              : !beside_rows        ? by_block_or_row
                              : page_table_.given() ? "(1), (batch, heads_kv) or (pages, heads_kv, page_size)"
                                                    : "(1), (batch, heads_kv) or (entries, heads_kv, rows)";
  // Before anything reads as many sizes as the caller's rank says there are.
  if (a.tensor.rank > (coarse || packed ? 2 : 3)) {
    invalid("{} has {} dimensions; it must be {}", a.name, a.tensor.rank, symbols);
  }
  common(a);
  Scales s{.data = static_cast<const float*>(address_of(a.tensor))};
  if (beside_rows) {
    scales_beside_rows(s, a, symbols);
    return s;
  }
  if (a.tensor.rank == 1 && (coarse || has_shape(a, {1}))) {
    check::shape(a, {1}, symbols);
  } else if (coarse || has_shape(a, {p_.batch, p_.heads_kv})) {
    check::shape(a, {p_.batch, p_.heads_kv}, "(1) or (batch, heads_kv)");
    s.batch_stride = stride_of(a.tensor, 0);
    s.head_stride = stride_of(a.tensor, 1);
    s.heads = heads / p_.heads_kv;
  } else {
    fine_scales(s, a, packed, heads, rows, symbols);
  }
  return s;
}

void ProblemBuilder::scales_beside_rows(Scales& s, const Argument& a, const char* symbols) const {
  if (has_shape(a, {1})) return;
  if (has_shape(a, {p_.batch, p_.heads_kv})) {
    s.batch_stride = stride_of(a.tensor, 0);
    s.head_stride = stride_of(a.tensor, 1);
    return;
  }
  if (!has_shape(a, {k_.size(0), p_.heads_kv, k_.size(1)})) {
    invalid("{} has shape {}; it must be {}, here (1), ({}, {}) or ({}, {}, {})", a.name,
            check::shape_of(a.tensor), symbols, p_.batch, p_.heads_kv, k_.size(0), p_.heads_kv, k_.size(1));
  }
  scales_by_row(s, a, 1);
}

void ProblemBuilder::fine_scales(Scales& s, const Argument& a, bool packed, std::int64_t heads,
                                 std::int64_t rows, const char* symbols) const {
  const std::int64_t blocks = (rows + quant_block - 1) / quant_block;
  const std::size_t head = packed ? 0 : 1;
  if (has_shape(a, {p_.batch, heads})) {
    s.batch_stride = stride_of(a.tensor, 0);
    s.head_stride = stride_of(a.tensor, 1);
    return;
  }
  if (packed && !has_shape(a, {heads, rows})) {
    invalid("{} has shape {}; it must be {}, here (1), ({}, {}) or ({}, {})", a.name,
            check::shape_of(a.tensor), symbols, p_.batch, heads, heads, rows);
  }
  if (!packed && !has_shape(a, {p_.batch, heads, blocks}) && !has_shape(a, {p_.batch, heads, rows})) {
    invalid("{} has shape {}; it must be {}, here (1), ({}, {}), ({}, {}, {}) or ({}, {}, {})", a.name,
            check::shape_of(a.tensor), symbols, p_.batch, heads, p_.batch, heads, blocks, p_.batch, heads,
            rows);
  }
  scales_by_row(s, a, head);
  if (!packed && a.size(2) == blocks) s.group = ScaleGroup::block;
}

void ProblemBuilder::scales_by_row(Scales& s, const Argument& a, std::size_t head) {
  s.group = ScaleGroup::row;
  s.batch_stride = head == 0 ? 0 : stride_of(a.tensor, 0);
  s.head_stride = stride_of(a.tensor, head);
  s.group_stride = stride_of(a.tensor, head + 1);
}

}  // namespace tandem
