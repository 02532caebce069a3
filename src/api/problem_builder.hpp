// Turns arguments into a Problem: first the sizes, from q, k, v and cu_seqlens, then everything else against
// them. Each subject has a file: problem_sizes, problem_tensors, problem_scales, problem_options.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <string_view>

#include "api/check.hpp"
#include "api/make_problem.hpp"

namespace tandem {

/// The address of tensors that were given without one: empty tensors, and tensors that are only described.
/// Never read.
alignas(256) inline constexpr std::byte nowhere{};

/// Given operands have an address, empty ones too.
inline void* address_of(const ConstTensor& t) {
  if (!t.given()) return nullptr;
  return const_cast<void*>(t.data != nullptr ? t.data : &nowhere);
}

/// The stride of a dimension; 0 where its size leaves one index, whatever the user's odd stride says.
inline std::int64_t stride_of(const ConstTensor& t, std::size_t dim) {
  return t.shape[dim] > 1 ? t.stride[dim] : 0;
}

/// A tensor's shape as the documentation calls it, with cu_seqlens and without.
struct Symbols {
  const char* packed;
  const char* batched;
};
constexpr Symbols like_out{"(total_q, heads_q, head_dim_v)", "(batch, seqlen_q, heads_q, head_dim_v)"};
constexpr Symbols like_query{"(total_q, heads_q, head_dim)", "(batch, seqlen_q, heads_q, head_dim)"};
constexpr Symbols like_key{"(total_k, heads_kv, head_dim)", "(batch, seqlen_k, heads_kv, head_dim)"};
constexpr Symbols like_value{"(total_k, heads_kv, head_dim_v)", "(batch, seqlen_k, heads_kv, head_dim_v)"};

/// The methods throw Error (invalid_argument) for what they name; sizes() comes first, inputs() and options()
/// before the rest.
class ProblemBuilder {
 public:
  using Argument = check::Argument;

  ProblemBuilder(const AttentionInputs& in, const AttentionOptions& options, Pass pass, Memory memory)
      : in_(in), options_(options), memory_(memory) {
    p_.pass = pass;
  }

  /// Batch, rows, heads and head dimensions.
  void sizes();
  /// The tensors that forward and backward share, with their scales and lengths.
  void inputs();
  void options();
  /// A tensor with the rows and heads of q.
  Operand like_q(const Argument& a, std::int64_t head_dim, const Symbols& symbols);
  /// A tensor with the rows and heads of k.
  Operand like_k(const Argument& a, std::int64_t head_dim, const Symbols& symbols);
  /// lse or its gradient.
  Operand row_statistics(const Argument& a);
  /// (heads_q) f32, optional.
  void by_head(const Argument& a);
  /// Outputs do not overlap themselves, one another or an input.
  void outputs(std::initializer_list<Argument> outputs, std::initializer_list<Argument> more_inputs) const;
  /// With options.check, what lengths hold.
  void contents() const;

  Problem& problem() { return p_; }

 private:
  static std::int64_t sequences(const Argument& cu_seqlens);
  void heads() const;
  void head_dim(const char* name, std::int64_t d, const char* tensors) const;
  void device();
  void precision();
  void precision_of_codes(Precision precision, DType dtype) const;
  /// Of k and v in backward: converting codes, as the rule on dtypes would say, loses their scales.
  void no_codes(const Argument& a) const;
  static void window(const char* name, std::int64_t value);
  /// What holds for every tensor once its shape and dtype are known.
  void common(const Argument& a);
  Operand rows(const Argument& a, bool packed, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
               const Symbols& symbols);
  Operand operand(const Argument& a, bool packed);
  Lengths lengths(const Argument& a, std::int64_t count, std::string_view symbols);
  /// Scales of a tensor of codes with these heads and rows.
  Scales scales(const Argument& a, const Argument& of, bool packed, std::int64_t heads, std::int64_t rows);
  /// Scales of query heads of their own, of blocks and of rows.
  void fine_scales(Scales& s, const Argument& a, bool packed, std::int64_t heads, std::int64_t rows,
                   const char* symbols) const;
  /// q is of 8-bit codes, and so are k and v then.
  [[nodiscard]] bool of_codes() const { return is_code(q_.tensor.dtype); }
  /// k and v alone are.
  [[nodiscard]] bool mixed() const { return is_code(k_.tensor.dtype) && !of_codes(); }

  const AttentionInputs& in_;
  const AttentionOptions& options_;
  Memory memory_;
  Problem p_;
  std::array<Argument, 11> inputs_{{{"q", in_.q},
                                    {"k", in_.k},
                                    {"v", in_.v},
                                    {"cu_seqlens_q", in_.cu_seqlens_q},
                                    {"cu_seqlens_k", in_.cu_seqlens_k},
                                    {"seqused_q", in_.seqused_q},
                                    {"seqused_k", in_.seqused_k},
                                    {"sink", in_.sink},
                                    {"q_scale", in_.q_scale},
                                    {"k_scale", in_.k_scale},
                                    {"v_scale", in_.v_scale}}};
  const Argument& q_ = inputs_[0];
  const Argument& k_ = inputs_[1];
  const Argument& v_ = inputs_[2];
  const Argument& cu_seqlens_q_ = inputs_[3];
  const Argument& cu_seqlens_k_ = inputs_[4];
};

}  // namespace tandem
