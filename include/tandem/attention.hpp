// Exact attention, forward and backward.
//
//   S = scale * Q K^T (+ softcap, + mask),  P = softmax(S),  O = P V,  LSE = log sum exp S
//
// Method: FlashAttention (Dao et al. 2022, arXiv:2205.14135), FlashAttention-2 (Dao 2023, arXiv:2307.08691)
// and FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608): the softmax is computed online, block by block,
// so that memory beyond inputs and outputs never grows with seqlen^2; the backward pass recomputes P from Q,
// K and LSE.
//
// Shapes. A tensor is (batch, seqlen, heads, head_dim), or, for sequences of different lengths packed end to
// end ("varlen"), (total, heads, head_dim) together with `cu_seqlens`. Any strides whose last dimension is
// contiguous. Head dimensions are at most 1024 on the CPU, and 256 on a GPU and in 8-bit precisions;
// forward calls of 16 bits take up to 576 of q and k and 512 of v on a GPU.
//
// Memory. Inputs may share memory with one another. An output has memory of its own: no element of it shares
// memory with another of its elements, with an element of another output, or with one of any input; in place
// (out over q) is an error too. Elements count, not the bytes between them: outputs may be slices of a buffer
// whose other slices are inputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "tandem/error.hpp"
#include "tandem/export.h"
#include "tandem/function.hpp"
#include "tandem/tensor.hpp"

namespace tandem {

/// What the products of a forward pass are computed in. All but `exact` round f16 or bf16 inputs to 8 bits on
/// the way, as docs/numerics.md (Low precision) says; the backward of such a call is the 16-bit one unless
/// AttentionOptions::backward_precision says otherwise. Errors and the speed of whole calls, which round as
/// well as multiply, are in docs/results.
enum class Precision : int {
  exact = 0,  ///< the dtype of the inputs
  fp8 = 1,    ///< e4m3: Q K^T and P V; block scales, Q and K rotated, K's mean removed
  /// s8 with scales by block, u8 P; exact sums. About a third of fp8's error, but twice it where a key with
  /// little value has most of the weight (an attention sink): take `strict` there.
  int8 = 2,
};

/// "exact", "fp8", "int8".
constexpr const char* name_of(Precision precision) {
  switch (precision) {
    case Precision::exact: return "exact";
    case Precision::fp8: return "fp8";
    case Precision::int8: return "int8";
  }
  return "unknown";
}

/// Options that forward and backward share. Defaults compute plain full attention.
struct AttentionOptions {
  /// Multiplies Q K^T. Default: head_dim_qk^-0.5. Any finite value, 0 and negative ones included.
  std::optional<float> scale;
  /// Query i sees keys up to i + seqlen_k - seqlen_q: the mask is aligned to the bottom right corner.
  bool causal = false;
  /// Sliding window, inclusive on both sides, around the same diagonal: query i sees keys from
  /// i + seqlen_k - seqlen_q - window_left to i + seqlen_k - seqlen_q + window_right. -1: unbounded. `causal`
  /// clips window_right to 0. Values below -1 are an error.
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  /// S becomes softcap * tanh(S / softcap) after scaling, before masking (Gemma 2). 0: off. Negative
  /// or above 1e30 is an error.
  float softcap = 0.0F;
  /// Backward: gradients are bitwise reproducible. Forward always is.
  bool deterministic = false;
  /// Also check the contents of cu_seqlens and seqused (reads them; on a GPU this synchronises).
  bool check = false;
  /// Forward in 8 bits, of f16 and bf16 inputs. Backward takes it too, and computes as backward_precision
  /// says. 8-bit inputs, quantized by the caller, go with fp8 (e4m3) or int8 (s8): nothing but P is then
  /// rounded. `exact` takes e4m3 inputs (on a GPU with a cache), and everywhere 8-bit k and v (e4m3 or s8, as
  /// a cache may hold them) beside a q of 16 bits or, on the CPU, f32: they go to q's dtype on the way.
  Precision precision = Precision::exact;
  /// With an 8-bit precision: no scale and no mean looks at a later row, so that a causal result is bitwise
  /// that of the sequence cut off behind it.
  bool strict = false;
  /// What the products of a backward pass are computed in. `int8`: S and dP in s8, with the values, the LSE
  /// and max_logits of a forward pass in int8, and gradients in e4m3; docs/results/gradients-in-8-bits.md has
  /// the recipe. It goes with precision int8, without softcap and sinks, on the CPU and on Hopper, there at
  /// head dimensions 64 and 128 and without `strict`; other than that and `exact` is an error. With `strict`
  /// it has scales of rows and no mean, so that dq of a causal row does not depend on later rows. Forward
  /// takes it too, and is the same with it.
  Precision backward_precision = Precision::exact;
  /// Forward: keys of a split, a multiple of 128; 0: off. Keys are then cut at its multiples, counted from
  /// the sequence's first key, and everything else that bits depend on follows from the model alone: heads,
  /// head dimensions, dtype and mask. A sequence's results do not depend on what else is in the batch, on its
  /// place there, on padding, on pages, or on whether its queries came in one call, in chunks or one by one.
  /// 1024 suits most lengths: small splits keep more of the machine busy with few sequences, large ones cost
  /// less in long prefills. With precision exact. Backward takes it too, and is the same with it.
  std::int64_t split_size = 0;
  /// Attention dropout: each entry of P is set to 0 with this probability, in [0, 1), and the others are
  /// divided by 1 - dropout_p. Which are kept depends on seed, offset, batch entry, query head, query and key
  /// alone (docs/functions.md has the formula); backward wants the same three. LSE is that of the whole
  /// softmax. With precision exact. 0: off.
  float dropout_p = 0.0F;
  std::uint64_t dropout_seed = 0;
  std::uint64_t dropout_offset = 0;
};

/// The tensors that forward and backward share.
struct AttentionInputs {
  ConstTensor q;  ///< (batch, seqlen_q, heads_q, head_dim_qk) or (total_q, heads_q, head_dim_qk)
  ConstTensor k;  ///< (batch, seqlen_k, heads_kv, head_dim_qk) or (total_k, heads_kv, head_dim_qk)
  ConstTensor v;  ///< (batch, seqlen_k, heads_kv, head_dim_v) or (total_k, heads_kv, head_dim_v)
  /// Varlen: (batch + 1) i32 or i64, ascending from 0; sequence b is rows [cu[b], cu[b+1]). Given for q, for
  /// k, or both; rows of q past cu_seqlens_q[batch] get out 0, lse -inf, and rows past the end of k and v get
  /// gradients 0.
  ConstTensor cu_seqlens_q;
  ConstTensor cu_seqlens_k;
  /// (batch) i32 or i64: only the first seqused rows of each sequence take part; the rest are as rows past
  /// the end.
  ConstTensor seqused_q;
  ConstTensor seqused_k;
  /// Sparse attention: which keys each query sees, as an indexer chooses them. (batch, seqlen_q, topk), or
  /// (batch, seqlen_q, heads_kv, topk) where each KV head has its own; with cu_seqlens_q (total_q, topk) or
  /// (total_q, heads_kv, topk). i32 or i64, any strides. A number is that of a key of the query's sequence,
  /// from 0, wherever the key lies: in k, in pages, in an entry of a cache, behind leftpad_k. Any order; -1
  /// and whatever else no key has name nothing; a key that is named twice counts twice. causal and the window
  /// hide what they hide of it. A query that sees none is as a query without keys. Rows that are not named
  /// are not read. CPU; with precision exact, without split_size, functions and dropout.
  ConstTensor indices;
  /// With indices: (batch, seqlen_q), or (total_q) with cu_seqlens_q, i32 or i64: only so many first numbers
  /// of each query count.
  ConstTensor topk_length;
  /// Forward: k and v are a cache in pages, (pages, page_size, heads_kv, head_dim), and row t of sequence b
  /// is row t % page_size of page page_table[b, t / page_size]. (batch, max_pages) i32 or i64. A sequence has
  /// seqused_k[b] rows, or, where that is not given, all max_pages * page_size. Entries past the end of a
  /// sequence may hold anything; where one in use names no page, its rows are 0. Any page size and any order
  /// of pages, which sequences may share. In place of cu_seqlens_k.
  ConstTensor page_table;
  /// Forward: (batch) i32 or i64, rows at the start of each sequence of k and v that are padding: rows
  /// leftpad_k[b] to seqused_k[b] take part. In place of cu_seqlens_k.
  ConstTensor leftpad_k;
  /// Forward: (batch) i32 or i64, which entry of k and v is sequence b's; their batch may then be another
  /// than q's, and sequences may share an entry. Without page_table and cu_seqlens_k.
  ConstTensor cache_batch_idx;
  /// Forward: (batch) i32 or i64: where it is not 0, the sequence's queries see no key past their own, as
  /// with `causal`; where it is 0, options.window_right stands alone. In place of options.causal, for batches
  /// of requests of both kinds.
  ConstTensor causal_by_sequence;
  /// (heads_q) f32: a learnable logit per head that joins the softmax's denominator and has no value
  /// (gpt-oss). It is neither scaled, capped nor masked. LSE includes it, and is the sink where a query sees
  /// no key.
  ConstTensor sink;
  /// f32 scales of 8-bit q, k, v: an element is its 8-bit value * scale. Default 1. An error with other
  /// dtypes. (1) or (batch, heads_kv), of which query heads use that of their kv head. With precision fp8 or
  /// int8, and of k and v where q is not 8-bit, also what quantize makes: (batch, heads), (batch, heads,
  /// ceil(seqlen / 128)) by block of 128 rows, or (batch, heads, seqlen) by row; for packed tensors (heads,
  /// total). A negative scale is the positive one of values with the other sign, s8's -128 becoming 127.
  ConstTensor q_scale;
  ConstTensor k_scale;  ///< by row for a cache too: (pages, heads_kv, page_size), (entries, heads_kv, rows)
  ConstTensor v_scale;  ///< likewise; those of rows that no sequence uses may be anything
  /// Functions of the caller's own (function.hpp), of calls with precision exact. The score function
  /// makes logits of scaled scores, after softcap; where it gives -inf a pair is masked. The mask function
  /// says which of the pairs that causal and window leave are visible. Null: none. They, and what they
  /// capture, must stay until the call returns; no output may share memory with what they capture.
  const Function* score_function = nullptr;
  const Function* mask_function = nullptr;
  /// With dropout: where batch entries lie among the whole of which the call has some rows and heads, so that
  /// the parts of a sequence keep what one call would. (batch, 4) i32, of each entry: its first query head
  /// counted through all batch entries of the whole (entry * heads + head); the place in its sequence of its
  /// first query; of its first key; and the distance in the sequence from row to row. Any numbers are safe,
  /// and are taken modulo 2^32. Not given: (b * heads_q, 0, 0, 1).
  ConstTensor dropout_places;
  /// An output gate: out is multiplied by sigmoid(gate), each element by its own, before it is rounded. Shape
  /// of out, q's dtype; f16, bf16 or f32. LSE and max_logits are those of the call without it. A query that
  /// sees no key has out 0 whatever its gate is. Backward takes the out that it gave. Without
  /// backward_precision int8; docs/support.md says which GPU kernels have it.
  ConstTensor gate;
};

/// Arguments of the forward pass.
struct ForwardArgs : AttentionInputs {
  /// Shape of q with head_dim_v; every element is written, in memory that no other tensor of the call has an
  /// element in. Same dtype as q, or f32, as parts that are to be merged want it; for 8-bit inputs f16, bf16
  /// or, on the CPU, f32, which other inputs with an 8-bit precision have there alone, too.
  Tensor out;
  /// Optional: (batch, heads_q, seqlen_q) f32, or (heads_q, total_q) for varlen queries. Natural logarithm.
  Tensor lse;
  /// Optional, as lse: the largest of the logits of the keys that a query sees, after scale, softcap and
  /// functions, without the sink; -inf where it sees none, NaN where lse is.
  Tensor max_logits;
  AttentionOptions options;
};

/// Arguments of the backward pass. 8-bit inputs are an error: the backward of an 8-bit forward is 16-bit.
struct BackwardArgs : AttentionInputs {
  ConstTensor out;         ///< from forward
  ConstTensor lse;         ///< from forward
  ConstTensor dout;        ///< gradient of out
  ConstTensor dlse;        ///< optional: gradient of lse, same shape, f32
  ConstTensor max_logits;  ///< from forward; with backward_precision int8, and an error else
  /// The gradients that are wanted; one at least, of these or of captured tensors. dq has the shape of q, dk
  /// of k, dv of v. They have q's dtype or f32, as parts that are to be added want it: dq on its own, dk and
  /// dv alike. dsink is (heads_q) f32, only with a sink. Each in memory of its own; they may be slices of one
  /// buffer. One that is not given is not computed where that saves work: on the CPU its products, on a GPU
  /// its conversion and its memory.
  Tensor dq;
  Tensor dk;
  Tensor dv;
  Tensor dsink;
  Tensor dgate;  ///< the gradient of gate, its shape and dtype; may be wanted alone
  /// dq, or dk and dv, are added to what they hold, f32, and nothing is added where no pair is visible. A GPU
  /// adds as it writes; on the CPU the workspace holds the gradients of the call first.
  bool accumulate_dq = false;
  bool accumulate_dk_dv = false;
  /// Gradients of the tensors that score_function captures, by their numbers; it has been made such that it
  /// differentiates them (FunctionBuilder::score_function). f32, of the tensor's shape; empty views are not
  /// wanted, and there may be fewer views than tensors. The views' memory stays for as long as the call. On
  /// the CPU bits do not depend on threads; on a GPU they are added up by atomic operations, in any order,
  /// and with `deterministic` they are an error.
  std::span<const Tensor> captured_gradients = {};
  AttentionOptions options;
};

/// How and where a call runs. A default-constructed Execution follows the tensors' device.
struct Execution {
  /// CPU: number of threads; 0 takes OMP_NUM_THREADS or every core this process may use. Either way there are
  /// no more than cores, or 16 where cores are fewer. A process forked from one that has computed with more
  /// than one thread has one.
  int threads = 0;
  /// GPU: a CUstream (cudaStream_t); null is the default stream.
  void* stream = nullptr;
  /// Scratch memory on the tensors' device, at least workspace_bytes(args) and 256-byte aligned. With it a
  /// call neither allocates nor synchronises. Null: the call allocates for itself.
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
  /// GPU: the persistent grids are those of a GPU with so many SMs at most, so that what other kernels need,
  /// those of NCCL say, is free beside them: a forward or backward kernel of a call, not the short ones
  /// before and behind it. The kernels sm80 forward are not persistent: with them it is an error. 0: all SMs.
  int sm_limit = 0;
  /// CPU: asked now and then by the thread that called, some 20 times a second, whether the call is to end
  /// before it is done. Once it returns true the threads finish what they have in hand and the call throws an
  /// Error of status interrupted, and every element of its outputs may hold anything. Null: nothing is asked.
  /// A GPU call is queued and not asked about.
  bool (*interrupted)(void* context) = nullptr;
  void* interrupted_context = nullptr;
};

/// Writes out (and lse). Throws Error before anything is written.
TANDEM_API void forward(const ForwardArgs& args, const Execution& execution = {});

/// Writes those of dq, dk, dv, dsink and dgate that are given. Throws Error before anything is written.
TANDEM_API void backward(const BackwardArgs& args, const Execution& execution = {});

/// Scratch bytes that a call with these arguments needs; linear in seqlen at most.
TANDEM_API std::size_t workspace_bytes(const ForwardArgs& args, const Execution& execution = {});
TANDEM_API std::size_t workspace_bytes(const BackwardArgs& args, const Execution& execution = {});

/// Which kernel and tiles would run these arguments and why, as a few lines of text. Throws what forward or
/// backward would throw. Tensors need shapes, dtypes and devices; their memory is not read.
TANDEM_API std::string explain(const ForwardArgs& args, const Execution& execution = {});
TANDEM_API std::string explain(const BackwardArgs& args, const Execution& execution = {});

/// The library's version, "major.minor.patch".
TANDEM_API const char* version() noexcept;

}  // namespace tandem
