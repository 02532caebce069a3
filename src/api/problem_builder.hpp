// Turns arguments into a Problem: first the sizes, from q, k, v and cu_seqlens, then everything else against
// them. Each subject has a file: problem_sizes, problem_cache, problem_tensors, problem_scales,
// problem_options, problem_functions.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <string_view>

#include "api/check.hpp"
#include "api/make_problem.hpp"
#include "api/operand_of.hpp"

namespace tandem {

using check::Symbols;
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
  /// After options(): the caller's own functions.
  void functions();
  /// A tensor with the rows and heads of q; one that is `written` may be f32 whatever q is.
  Operand like_q(const Argument& a, std::int64_t head_dim, const Symbols& symbols, bool written = false);
  /// A tensor with the rows and heads of k.
  Operand like_k(const Argument& a, std::int64_t head_dim, const Symbols& symbols, bool written = false);
  /// lse or its gradient.
  Operand row_statistics(const Argument& a);
  /// (heads_q) f32, optional.
  void by_head(const Argument& a);
  /// Outputs do not overlap themselves, one another or an input.
  void outputs(std::initializer_list<Argument> outputs, std::initializer_list<Argument> more_inputs) const;
  /// After outputs(): the gradients of captured tensors, apart from `others` and the inputs.
  void captured_gradients(std::initializer_list<Argument> others) const;
  /// With options.check, what lengths hold.
  void contents() const;

  Problem& problem() { return p_; }

 private:
  static std::int64_t sequences(const Argument& cu_seqlens);
  /// Which of the arguments that make k and v a cache go together.
  void cache_arguments() const;
  void shapes_of_keys() const;
  Pages pages();
  Indices indices();
  Operand gate();
  /// Refuses what does not go with indices.
  void indices_alone() const;
  void heads() const;
  void head_dim(const char* name, std::int64_t d) const;
  void precision();
  void split_size();
  void dropout();
  void dropout_places();
  void eight_bit_head_dims() const;
  void precision_of_quantized(Precision precision, DType dtype) const;
  /// Refuses quantized k and v in backward: converting them, as the rule on dtypes would say, loses their
  /// scales.
  void not_quantized(const Argument& a) const;
  void function(const char* name, const Function* f, Function::Kind kind) const;
  void outputs_apart_from_captured(std::initializer_list<Argument> outputs) const;
  void captured_gradient(const Argument& gradient, std::size_t number) const;
  void causal_by_sequence();
  /// What holds for every tensor once its shape and dtype are known.
  void common(const Argument& a);
  Operand rows(const Argument& a, bool packed, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
               const Symbols& symbols, bool written);
  Operand operand(const Argument& a, bool packed);
  Lengths lengths(const Argument& a, std::int64_t count, std::string_view symbols);
  /// Scales of a tensor of quantized values with these heads and rows.
  Scales scales(const Argument& a, const Argument& of, bool packed, std::int64_t heads, std::int64_t rows);
  /// Scales of k and v that are read without quantising them anew: by tensor, head or row.
  void scales_beside_rows(Scales& s, const Argument& a, const char* symbols) const;
  /// Scales of query heads of their own, of blocks and of rows.
  void fine_scales(Scales& s, const Argument& a, bool packed, std::int64_t heads, std::int64_t rows,
                   const char* symbols) const;
  /// Scales by row (or block) whose dimension `head` is the heads, and the one behind it the rows.
  static void scales_by_row(Scales& s, const Argument& a, std::size_t head);
  /// q is of 8-bit values, and so are k and v then.
  [[nodiscard]] bool quantized_inputs() const { return is_eight_bit(q_.tensor.dtype); }
  /// k and v are in pages, chosen by index, or padded on the left.
  [[nodiscard]] bool is_cache() const {
    return page_table_.given() || leftpad_k_.given() || cache_batch_idx_.given();
  }
  /// k and v alone are.
  [[nodiscard]] bool mixed() const { return is_eight_bit(k_.tensor.dtype) && !quantized_inputs(); }

  const AttentionInputs& in_;
  const AttentionOptions& options_;
  Memory memory_;
  Problem p_;
  std::array<Argument, 19> inputs_{{{"q", in_.q},
                                    {"k", in_.k},
                                    {"v", in_.v},
                                    {"cu_seqlens_q", in_.cu_seqlens_q},
                                    {"cu_seqlens_k", in_.cu_seqlens_k},
                                    {"seqused_q", in_.seqused_q},
                                    {"seqused_k", in_.seqused_k},
                                    {"sink", in_.sink},
                                    {"q_scale", in_.q_scale},
                                    {"k_scale", in_.k_scale},
                                    {"v_scale", in_.v_scale},
                                    {"page_table", in_.page_table},
                                    {"leftpad_k", in_.leftpad_k},
                                    {"cache_batch_idx", in_.cache_batch_idx},
                                    {"causal_by_sequence", in_.causal_by_sequence},
                                    {"dropout_places", in_.dropout_places},
                                    {"indices", in_.indices},
                                    {"topk_length", in_.topk_length},
                                    {"gate", in_.gate}}};
  const Argument& q_ = inputs_[0];
  const Argument& k_ = inputs_[1];
  const Argument& v_ = inputs_[2];
  const Argument& cu_seqlens_q_ = inputs_[3];
  const Argument& cu_seqlens_k_ = inputs_[4];
  const Argument& page_table_ = inputs_[11];
  const Argument& leftpad_k_ = inputs_[12];
  const Argument& cache_batch_idx_ = inputs_[13];
  const Argument& causal_by_sequence_ = inputs_[14];
  const Argument& indices_ = inputs_[16];
  const Argument& topk_length_ = inputs_[17];
  const Argument& gate_ = inputs_[18];
};

}  // namespace tandem
