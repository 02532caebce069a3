// Tensors as operands: dtypes, devices, strides, memory.
#include "api/problem_builder.hpp"

#include "api/lengths.hpp"

namespace tandem {
using check::invalid;

void ProblemBuilder::inputs() {
  if (p_.pass == Pass::backward) {
    if (quantized_inputs()) {
      invalid("q is {}; the backward of an 8-bit forward is 16-bit: pass q, k and v in f16, bf16 or f32",
              name_of(q_.tensor.dtype));
    }
    check::dtype(q_, {DType::f32, DType::f16, DType::bf16});
    for (const Argument* a : {&k_, &v_}) not_quantized(*a);
  } else {
    check::dtype(q_, {DType::f32, DType::f16, DType::bf16, DType::e4m3, DType::s8});
  }
  if (p_.pass == Pass::forward && mixed()) {
    check::same_dtype(v_, k_);
  } else {
    check::same_dtype(k_, q_);
    check::same_dtype(v_, q_);
  }
  p_.device = check::device(q_);
  p_.q = operand(q_, p_.packed_q);
  p_.k = operand(k_, p_.packed_k);
  p_.v = operand(v_, p_.packed_k);
  p_.cu_seqlens_q = lengths(cu_seqlens_q_, p_.batch + 1, "(batch + 1)");
  p_.cu_seqlens_k = lengths(cu_seqlens_k_, p_.batch + 1, "(batch + 1)");
  p_.seqused_q = lengths(inputs_[5], p_.batch, "(batch)");
  p_.seqused_k = lengths(inputs_[6], p_.batch, "(batch)");
  p_.pages = pages();
  p_.indices = indices();
  p_.leftpad_k = lengths(leftpad_k_, p_.batch, "(batch)");
  p_.cache_batch_idx = lengths(cache_batch_idx_, p_.batch, "(batch)");
  p_.cache_batch = k_.size(0);
  p_.causal_by_sequence = lengths(causal_by_sequence_, p_.batch, "(batch)");
  by_head(inputs_[7]);
  p_.sink = static_cast<const float*>(address_of(in_.sink));
  p_.sink_stride = stride_of(in_.sink, 0);
  p_.q_scale = scales(inputs_[8], q_, p_.packed_q, p_.heads_q, p_.rows_q);
  p_.k_scale = scales(inputs_[9], k_, p_.packed_k, p_.heads_kv, p_.rows_k);
  p_.v_scale = scales(inputs_[10], v_, p_.packed_k, p_.heads_kv, p_.rows_k);
  p_.gate = gate();
}

Operand ProblemBuilder::gate() {
  check::consistent(gate_);
  if (!gate_.given()) return {};
  if (quantized_inputs()) {
    fail(Status::unsupported,
         "gate is given with q in {}, whose calls have none; multiply out by its sigmoid",
         name_of(q_.tensor.dtype));
  }
  return like_q(gate_, p_.head_dim_v, like_out);
}

void ProblemBuilder::not_quantized(const Argument& a) const {
  if (!is_eight_bit(a.tensor.dtype)) return;
  invalid("{} is {}; 8-bit k and v have no backward: pass those they were made from, in {}", a.name,
          name_of(a.tensor.dtype), name_of(q_.tensor.dtype));
}

void ProblemBuilder::common(const Argument& a) {
  check::same_device(a, q_);
  check::extent(a);
  if (memory_ == Memory::present) check::memory(a);
}

Operand ProblemBuilder::operand(const Argument& a, bool packed) {
  common(a);
  check::last_dimension_contiguous(a);
  const int row = packed ? 0 : 1;
  return operand_of(a.tensor, row - 1, row, row + 1);
}

Operand ProblemBuilder::rows(const Argument& a, bool packed, std::int64_t rows, std::int64_t heads,
                             std::int64_t head_dim, const Symbols& symbols, bool written) {
  check::given(a, packed ? symbols.packed : symbols.batched);
  check::shape(a, packed, {p_.batch, rows, heads, head_dim}, symbols);
  if (quantized_inputs()) {
    check::dtype(a, {DType::f32, DType::f16, DType::bf16});
  } else if (!written || a.tensor.dtype != DType::f32) {  // what is written may have all of its digits
    check::same_dtype(a, q_);
  }
  return operand(a, packed);
}

Operand ProblemBuilder::like_q(const Argument& a, std::int64_t head_dim, const Symbols& symbols,
                               bool written) {
  return rows(a, p_.packed_q, p_.rows_q, p_.heads_q, head_dim, symbols, written);
}

Operand ProblemBuilder::like_k(const Argument& a, std::int64_t head_dim, const Symbols& symbols,
                               bool written) {
  return rows(a, p_.packed_k, p_.rows_k, p_.heads_kv, head_dim, symbols, written);
}

Operand ProblemBuilder::row_statistics(const Argument& a) {
  check::consistent(a);
  if (!a.given()) return {};
  check::shape(a, p_.packed_q, {p_.batch, p_.heads_q, p_.rows_q},
               {"(heads_q, total_q)", "(batch, heads_q, seqlen_q)"});
  check::dtype(a, {DType::f32});
  common(a);
  const int head = p_.packed_q ? 0 : 1;
  return operand_of(a.tensor, head - 1, head + 1, head);
}

void ProblemBuilder::by_head(const Argument& a) {
  check::consistent(a);
  if (!a.given()) return;
  check::shape(a, {p_.heads_q}, "(heads_q)");
  check::dtype(a, {DType::f32});
  common(a);
}

Lengths ProblemBuilder::lengths(const Argument& a, std::int64_t count, std::string_view symbols) {
  check::consistent(a);
  if (!a.given()) return {};
  check::shape(a, {count}, symbols);
  check::dtype(a, {DType::i32, DType::i64});
  common(a);
  return lengths_of(a.tensor);
}

void ProblemBuilder::outputs(std::initializer_list<Argument> outputs,
                             std::initializer_list<Argument> more_inputs) const {
  for (const Argument& a : outputs) check::no_self_overlap(a);
  check::separate(outputs, more_inputs, inputs_);
  if (p_.has_function()) outputs_apart_from_captured(outputs);
}

void ProblemBuilder::contents() const {
  if (options_.check && memory_ == Memory::present) check::lengths_contents(p_);
}

}  // namespace tandem
