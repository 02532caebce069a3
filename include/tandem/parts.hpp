// Attention of one sequence, of which a call has some queries and some keys at hand: context parallelism.
//
// A process holds pieces of a sequence, and other processes' keys come to it one piece after another. For
// each of them forward_part adds what these keys give to out and lse, and backward_part adds the gradients of
// the pairs to dq, dk and dv. Which pairs a mask leaves follows from the places of the pieces in the
// sequence. docs/guides/context-parallel.md shows the calls of a rank, examples/ring is a program.
//
// A piece is consecutive rows of a sequence; every entry of a batch has the same places. Sequences have as
// many queries as keys, and query i is at the place of key i. A sink is not part of a call, since it joins a
// softmax once: to add it, merge (cache.hpp) out with one more part, whose out is 0 and whose lse is the
// sink's logit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "tandem/attention.hpp"

namespace tandem {

/// What all calls of a sequence share. A mask is that of the whole sequence. Defaults compute full attention.
struct PartOptions {
  std::optional<float> scale;  ///< as in AttentionOptions, and so are the others
  bool causal = false;         ///< query i sees keys up to i
  /// Query i sees keys i - window_left to i + window_right. -1: unbounded. `causal` clips window_right to 0.
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  float softcap = 0.0F;
  bool deterministic = false;
};

/// Consecutive rows: `first` to first + count - 1.
struct Piece {
  std::int64_t first = 0;
  std::int64_t count = 0;
  friend constexpr bool operator==(const Piece&, const Piece&) = default;
};

/// The call that computes what a piece of queries and a piece of keys have in common: forward or backward
/// over these rows of the two pieces, with this window in AttentionOptions and without `causal`. Other rows
/// have no visible pair.
struct PartCall {
  Piece queries;  ///< counted from the first row of the piece
  Piece keys;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  /// Whether no query sees a key, so that there is nothing to call.
  [[nodiscard]] bool empty() const { return queries.count == 0; }
  friend constexpr bool operator==(const PartCall&, const PartCall&) = default;
};

/// Of the options the mask counts. Places and counts are from 0 to 2^60; throws Error (invalid_argument).
/// Ranks know from it which pieces need not be sent at all.
TANDEM_API PartCall part_call(const Piece& queries, const Piece& keys, const PartOptions& options = {});

/// The tensors that forward_part and backward_part share. Any strides whose last dimension is contiguous.
struct PartInputs {
  ConstTensor q;                 ///< (batch, seqlen_q, heads_q, head_dim_qk): f32, f16 or bf16
  ConstTensor k;                 ///< (batch, seqlen_k, heads_kv, head_dim_qk), of q's dtype
  ConstTensor v;                 ///< (batch, seqlen_k, heads_kv, head_dim_v), of q's dtype
  std::int64_t first_query = 0;  ///< the place in the sequence of the first row of q
  std::int64_t first_key = 0;    ///< and of k and v
  PartOptions options;
  /// Results are added to what the outputs hold. False, for the first call: outputs are written, whatever
  /// they held, rows without a visible pair as well.
  bool accumulate = true;
};

/// Arguments of forward_part.
struct ForwardPartArgs : PartInputs {
  Tensor out;  ///< (batch, seqlen_q, heads_q, head_dim_v) f32: attention over all keys so far
  Tensor lse;  ///< (batch, heads_q, seqlen_q) f32, natural logarithm; -inf where a query saw no key, out is 0
               ///< there
};

/// Arguments of backward_part.
struct BackwardPartArgs : PartInputs {
  /// Of these queries over all keys of the sequence, as the last forward_part left it, but in q's dtype:
  /// merge of one part rounds it.
  ConstTensor out;
  ConstTensor lse;   ///< (batch, heads_q, seqlen_q) f32, likewise over all keys
  ConstTensor dout;  ///< gradient of out, in q's dtype
  ConstTensor dlse;  ///< optional: gradient of lse, f32
  /// The gradients that are wanted, one at least, in the shapes of q, k and v. To accumulate they are f32;
  /// with accumulate = false q's dtype or f32, dk and dv alike.
  Tensor dq;
  Tensor dk;
  Tensor dv;
};

/// Adds the part of these keys to out and lse. The sum over parts is, within the bounds of one call, what
/// forward gives over all keys at once; it depends on their order only by rounding in f32. On the CPU and on
/// GPUs. Throws Error, as forward does, before anything is written.
TANDEM_API void forward_part(const ForwardPartArgs& args, const Execution& execution = {});

/// Adds the gradients of these pairs to those of dq, dk and dv that are given. Throws Error, as backward
/// does, before anything is written.
TANDEM_API void backward_part(const BackwardPartArgs& args, const Execution& execution = {});

/// Scratch bytes that a call with these arguments needs: to accumulate, those of its results in f32 (of
/// forward_part twice, of backward_part on the CPU alone) besides those of the call of forward or backward.
TANDEM_API std::size_t workspace_bytes(const ForwardPartArgs& args, const Execution& execution = {});
TANDEM_API std::size_t workspace_bytes(const BackwardPartArgs& args, const Execution& execution = {});

}  // namespace tandem
