// What a call is about, once its arguments have been checked: plain numbers and pointers.
// Everything below `api` trusts a Problem; nothing below `api` sees user arguments again.
#pragma once

#include <algorithm>
#include <cstdint>

#include "problem/dropout.hpp"
#include "problem/recipe.hpp"
#include "problem/score_options.hpp"
#include "tandem/attention.hpp"

namespace tandem {

/// A tensor of a Problem, addressed by (batch, row, head); the last dimension is contiguous. Strides in
/// elements. Packed (varlen) tensors have batch_stride 0 and rows counted over all sequences.
struct Operand {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;

  [[nodiscard]] bool given() const { return data != nullptr; }
  [[nodiscard]] std::int64_t offset(std::int64_t batch, std::int64_t row, std::int64_t head) const {
    return batch * batch_stride + row * row_stride + head * head_stride;
  }
};

/// A vector of row counts or offsets, i32 or i64, as the user gave it.
struct Lengths {
  const void* data = nullptr;
  bool wide = false;  ///< i64
  std::int64_t stride = 1;

  [[nodiscard]] bool given() const { return data != nullptr; }
  [[nodiscard]] std::int64_t operator[](std::int64_t i) const {
    return wide ? static_cast<const std::int64_t*>(data)[i * stride]
                : static_cast<const std::int32_t*>(data)[i * stride];
  }
};

constexpr bool is_eight_bit(DType dtype) {
  return dtype == DType::e4m3 || dtype == DType::s8;
}

/// f32 dequantisation scales of 8-bit values; stride 0 where one scale serves all.
struct Scales {
  const float* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t group_stride = 0;        ///< from block to block, or from row to row of the tensor
  ScaleGroup group = ScaleGroup::head;  ///< head, which may be all, block or row
  std::int64_t heads = 1;               ///< heads that share a scale: q may have those of its kv heads

  /// The scale of a (batch, kv head): group `head` alone.
  [[nodiscard]] float at(std::int64_t batch, std::int64_t kv_head) const {
    return data != nullptr ? data[batch * batch_stride + kv_head * head_stride] : 1.0F;
  }
};

/// Which page of k and v holds which rows of a sequence. k and v are (pages, page_size, heads_kv, head_dim):
/// their batch_stride leads from page to page, their row_stride from row to row of one.
struct Pages {
  const void* table = nullptr;  ///< (batch, per_sequence), i32 or i64
  bool wide = false;            ///< i64
  std::int64_t batch_stride = 0;
  std::int64_t stride = 1;
  std::int64_t per_sequence = 0;
  std::int64_t count = 0;  ///< pages of the cache
  std::int64_t page_size = 1;

  [[nodiscard]] bool given() const { return table != nullptr; }
  /// Entry `i` of sequence `b` as it is written.
  [[nodiscard]] std::int64_t entry(std::int64_t b, std::int64_t i) const {
    const std::int64_t at = b * batch_stride + i * stride;
    return wide ? static_cast<const std::int64_t*>(table)[at] : static_cast<const std::int32_t*>(table)[at];
  }
  /// The page that it names; -1 if there is no such page, whose rows are read as zeros.
  [[nodiscard]] std::int64_t page(std::int64_t b, std::int64_t i) const {
    const std::int64_t page = entry(b, i);
    return page >= 0 && page < count ? page : -1;
  }
};

/// Which keys of its sequence each query sees, by their numbers: any order, some more than once. A number
/// that no key has stands for none.
struct Indices {
  Operand numbers;          ///< i32 or i64; head: the KV head's, or all have the same
  std::int64_t stride = 1;  ///< from one number of a query to the next
  std::int64_t count = 0;   ///< numbers of a query
  Operand lengths;          ///< i32 or i64, by (batch, row): only so many first ones count; may lack data

  [[nodiscard]] bool given() const { return numbers.given(); }
  [[nodiscard]] static std::int64_t integer(const Operand& x, std::int64_t at) {
    return x.dtype == DType::i64 ? static_cast<const std::int64_t*>(x.data)[at]
                                 : static_cast<const std::int32_t*>(x.data)[at];
  }
  /// How many numbers the query in `row` of q has.
  [[nodiscard]] std::int64_t length(std::int64_t batch, std::int64_t row) const {
    if (!lengths.given()) return count;
    return std::clamp<std::int64_t>(integer(lengths, lengths.offset(batch, row, 0)), 0, count);
  }
  [[nodiscard]] std::int64_t number(std::int64_t batch, std::int64_t row, std::int64_t kv_head,
                                    std::int64_t i) const {
    return integer(numbers, numbers.offset(batch, row, kv_head) + i * stride);
  }
};

enum class Pass { forward, backward };

/// The largest head dimension of any backend. GPU kernels, and products in 8 bits, take less.
constexpr std::int64_t max_head_dim = 1024;
constexpr std::int64_t max_gpu_head_dim = 256;
/// The largest head dimensions of the forward kernel for wide heads.
constexpr std::int64_t max_gpu_wide_head_dim_qk = 576;
constexpr std::int64_t max_gpu_wide_head_dim_v = 512;
constexpr std::int64_t max_eight_bit_head_dim = 256;

struct Problem : ScoreOptions {
  Pass pass = Pass::forward;
  Device device;

  std::int64_t batch = 0;
  std::int64_t heads_q = 0;
  std::int64_t heads_kv = 0;
  std::int64_t head_dim_qk = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t rows_q = 0;  ///< rows of q in one batch entry, or in all (packed_q)
  std::int64_t rows_k = 0;  ///< with pages, those that one sequence can have
  bool packed_q = false;
  bool packed_k = false;

  /// Keys visible to query i: [i + shift - window_left, i + shift + window_right], shift = seqlen_k -
  /// seqlen_q. -1: unbounded. `causal` is already folded in (window_right 0, or less if that were possible).
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  Lengths causal_by_sequence;  ///< not 0: this sequence's window_right is 0; read through window_of
  bool deterministic = false;
  std::int64_t split_size = 0;  ///< keys of a split; 0: off. Then bits do not depend on the batch
  Precision precision = Precision::exact;
  bool strict = false;
  Precision backward_precision = Precision::exact;  ///< exact, or int8 with precision int8

  Operand q, k, v, out;
  Operand dout, dq, dk, dv;
  bool f32_dq = false;  ///< dq is f32 whatever q is, and so are dk and dv
  bool f32_dk_dv = false;
  bool adds_dq = false;  ///< dq, in f32, is added to what is there, and so are dk and dv
  bool adds_dk_dv = false;
  /// f32, addressed by (batch, head, row) in the same way: row_stride between rows, head_stride between
  /// heads.
  Operand lse, dlse;
  Operand max_logits;  ///< likewise: written by forward where given, read by backward in 8 bits
  /// As out: what its sigmoid multiplies, and the gradient of that. With a gate, backward's kernels have as
  /// dout the gradient of O before the gate, which a pass before them makes; gated_dout is then out's own.
  Operand gate, dgate, gated_dout;
  const float* sink = nullptr;  ///< by query head
  std::int64_t sink_stride = 1;
  float* dsink = nullptr;
  std::int64_t dsink_stride = 1;
  Scales q_scale, k_scale, v_scale;
  Lengths cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  Dropout dropout;
  const Function* score_function = nullptr;  ///< from the scaled and capped score to the logit
  const Function* mask_function = nullptr;   ///< which of the pairs that the window leaves are visible
  bool window_of_mask = false;  ///< a mask function gave bounds of the window, and is what it says besides
  /// Backward: f32, by the numbers of the score function's captured tensors; without data: not wanted.
  std::span<const Tensor> captured_gradients = {};
  Indices indices;
  Pages pages;
  Lengths leftpad_k;
  Lengths cache_batch_idx;
  std::int64_t cache_batch = 0;  ///< entries of k and v, read with cache_batch_idx

  /// q, k and v are 8-bit values.
  [[nodiscard]] bool quantized_inputs() const { return is_eight_bit(q.dtype); }
  /// k and v alone are.
  [[nodiscard]] bool mixed() const { return is_eight_bit(k.dtype) && !is_eight_bit(q.dtype); }
  /// k and v are in pages, chosen by index, or padded on the left.
  [[nodiscard]] bool of_cache() const {
    return pages.given() || leftpad_k.given() || cache_batch_idx.given();
  }
  [[nodiscard]] bool wants_captured_gradients() const {
    return std::any_of(captured_gradients.begin(), captured_gradients.end(),
                       [](const Tensor& t) { return t.rank > 0; });
  }
  /// Something is asked of every pair of query and key: a function of the caller's, or dropout.
  [[nodiscard]] bool has_function() const {
    return score_function != nullptr || mask_function != nullptr || dropout.on;
  }
  [[nodiscard]] std::int64_t group() const { return heads_kv > 0 ? heads_q / heads_kv : 0; }
};

/// The rows of one sequence: rows [begin, begin + used) take part, [begin + used, end) are past its end.
struct Rows {
  std::int64_t begin = 0;
  std::int64_t used = 0;
  std::int64_t end = 0;
};

/// Rows of sequence `b`, clamped to the tensor whatever cu_seqlens and seqused contain.
inline Rows sequence_rows(const Lengths& cu_seqlens, const Lengths& seqused, std::int64_t rows,
                          std::int64_t b) {
  Rows r{.begin = 0, .used = rows, .end = rows};
  if (cu_seqlens.given()) {
    r.begin = std::clamp<std::int64_t>(cu_seqlens[b], 0, rows);
    r.end = std::clamp<std::int64_t>(cu_seqlens[b + 1], r.begin, rows);
  }
  r.used = r.end - r.begin;
  if (seqused.given()) r.used = std::clamp<std::int64_t>(seqused[b], 0, r.used);
  return r;
}
inline Rows query_rows(const Problem& p, std::int64_t b) {
  return sequence_rows(p.cu_seqlens_q, p.seqused_q, p.rows_q, b);
}
inline Rows key_rows(const Problem& p, std::int64_t b) {
  Rows r =
      sequence_rows(p.cu_seqlens_k, p.seqused_k, p.pages.given() && p.pages.count == 0 ? 0 : p.rows_k, b);
  if (p.leftpad_k.given()) {
    const std::int64_t skipped = std::clamp<std::int64_t>(p.leftpad_k[b], 0, r.used);
    r.begin += skipped;
    r.used -= skipped;
  }
  if (p.cache_batch_idx.given() && (p.cache_batch_idx[b] < 0 || p.cache_batch_idx[b] >= p.cache_batch)) {
    r.used = 0;
  }
  return r;
}

/// Where a row of sequence `b` lies in k and v: in which entry (or page, -1 if there is no such page) and in
/// which row of it.
struct KeyPlace {
  std::int64_t batch = 0;
  std::int64_t row = 0;
};
inline KeyPlace key_place(const Problem& p, std::int64_t b, std::int64_t row) {
  if (p.pages.given()) {
    return {.batch = p.pages.page(b, row / p.pages.page_size), .row = row % p.pages.page_size};
  }
  return {.batch = p.cache_batch_idx.given() ? p.cache_batch_idx[b] : b, .row = row};
}

/// The window of sequence `b`, as Problem::window_left and window_right have it.
struct Window {
  std::int64_t left = -1;
  std::int64_t right = -1;
};
inline Window window_of(const Problem& p, std::int64_t b) {
  const bool causal = p.causal_by_sequence.given() && p.causal_by_sequence[b] != 0;
  return {.left = p.window_left, .right = causal ? 0 : p.window_right};
}

/// Keys [first, last) of a sequence that query `i` sees, given the lengths in use. Empty if first >= last.
struct KeyRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
};
inline KeyRange visible_keys(const Window& window, std::int64_t i, std::int64_t seqlen_q,
                             std::int64_t seqlen_k) {
  const std::int64_t diagonal = i + seqlen_k - seqlen_q;
  KeyRange r{.first = 0, .last = seqlen_k};
  if (window.left >= 0) r.first = std::max<std::int64_t>(0, diagonal - window.left);
  if (window.right >= 0) r.last = std::min(seqlen_k, diagonal + window.right + 1);
  return r;
}

/// Pairs of query and key that one head of a sequence is counted for in FLOP: those visible, but half of the
/// full square for a causal one, as everybody counts.
inline double counted_pairs(const Window& window, std::int64_t seqlen_q, std::int64_t seqlen_k) {
  const double all = static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k);
  if (window.left < 0 && window.right < 0) return all;
  if (window.left < 0 && window.right == 0 && seqlen_q == seqlen_k) return all / 2;
  double pairs = 0;
  for (std::int64_t i = 0; i < seqlen_q; ++i) {
    const KeyRange seen = visible_keys(window, i, seqlen_q, seqlen_k);
    pairs += static_cast<double>(std::max<std::int64_t>(0, seen.last - seen.first));
  }
  return pairs;
}

}  // namespace tandem
