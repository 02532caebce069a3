// A cache of keys and values, written token by token, and results of attention computed in parts, merged.
//
// attention.hpp reads such a cache: page_table, cache_batch_idx, leftpad_k and seqused_k are the same there.
#pragma once

#include <span>

#include "tandem/attention.hpp"

namespace tandem {

/// Arguments of append_kv. Head dimensions are from 1 to 1024. The caches, their scales and q_out have memory
/// of their own, as the outputs in attention.hpp: K and V may alternate in one tensor, but share no element.
struct AppendArgs {
  /// (batch, seqlen_new, heads_kv, head_dim), or (total_new, heads_kv, head_dim) with cu_seqlens_new or
  /// slot_mapping. f32, f16, bf16, e4m3 or s8; the last dimension contiguous.
  ConstTensor k_new;
  ConstTensor v_new;  ///< the same with head_dim_v; left out together with v_cache where only keys are kept
  /// (batch + 1) i32 or i64, ascending from 0: the new tokens of sequence b are rows [cu[b], cu[b + 1]).
  ConstTensor cu_seqlens_new;
  /// (batch) i32 or i64: only the first seqused_new tokens of each sequence are appended.
  ConstTensor seqused_new;
  /// Written in place: (batch, seqlen, heads_kv, head_dim); with cache_batch_idx or slot_mapping (entries,
  /// seqlen, heads_kv, head_dim); with page_table (pages, page_size, heads_kv, head_dim). Any strides, the
  /// last dimension contiguous. Any of the same dtypes, but e4m3 and s8 do not become one another. Values are
  /// rounded to nearest even; codes of 8 bits become code * scale.
  Tensor k_cache;
  Tensor v_cache;  ///< the same with head_dim_v, of k_cache's dtype
  /// (batch, max_pages) i32 or i64: row t of sequence b is row t % page_size of page page_table[b, t /
  /// page_size]. Entries that no new token needs may hold anything.
  ConstTensor page_table;
  ConstTensor cache_batch_idx;  ///< (batch) i32 or i64: the entry that sequence b is written to
  /// (batch) i32 or i64: rows of padding at the start of each sequence. It moves no row; with `check` there
  /// are no more of them than cache_seqlens says.
  ConstTensor leftpad_k;
  /// (batch) i32 or i64: rows of each sequence before the append. New token j of sequence b goes to row
  /// cache_seqlens[b] + j. Below 0: nothing of the sequence is appended.
  ConstTensor cache_seqlens;
  /// (total_new) i32 or i64, in place of cu_seqlens_new, seqused_new, page_table, cache_batch_idx, leftpad_k
  /// and cache_seqlens: token t goes to row slot % seqlen of entry slot / seqlen, where seqlen (or page_size)
  /// is the second dimension of k_cache. Below 0: the token is not appended.
  ConstTensor slot_mapping;
  /// f32 scales of an 8-bit cache, given, (1) or (batch, heads_kv), with slot_mapping (1) or (1, heads_kv):
  /// the code is that of value / scale, to nearest even, saturated. Default 1. NaN and infinities become
  /// e4m3's NaN, and 0 in s8, which has none. Where codes become values, those of k_new: of rows that are not
  /// packed also (batch, heads_kv, seqlen_new), with any strides.
  ConstTensor k_scale;
  ConstTensor v_scale;
  /// f32, written: a scale for each row and head of an 8-bit cache, found as `quantize` by row finds it, in
  /// place of k_scale and v_scale. (entries or pages, heads_kv, rows) of the cache, with any strides: what
  /// AttentionInputs::k_scale and v_scale take. Those of rows that are not appended stay as they are. A row
  /// of zeros has scale 0; one of s8 that holds a NaN or an infinity has scale NaN.
  Tensor k_scale_cache;
  Tensor v_scale_cache;
  /// Optional: a rotary embedding of k_new, and of q where given: both (positions, rotary_dim / 2), f32 or
  /// the dtype of k_new, the last dimension contiguous. rotary_dim is a multiple of 16 and at most head_dim;
  /// channels past it stay as they are. Token j of sequence b takes row cache_seqlens[b] + j. Pairs of
  /// channels and arithmetic are those of QuantizeArgs.
  ConstTensor rotary_cos;
  ConstTensor rotary_sin;
  /// (batch) i32 or i64, in place of cache_seqlens for the position; with slot_mapping (total_new), the
  /// position of each token, and needed.
  ConstTensor rotary_offsets;
  bool rotary_interleaved = false;  ///< pairs are channels 2 c and 2 c + 1, not c and c + rotary_dim / 2
  /// Optional, with a rotary embedding: queries of the same tokens, (batch, seqlen_new, heads_q, head_dim) or
  /// (total_new, heads_q, head_dim), of k_new's dtype.
  ConstTensor q;
  Tensor q_out;  ///< shape and dtype of q, written: embedded; 0 in rows that belong to no token in use
  /// Also check what the integers contain: lengths fit, pages and positions exist, and no two tokens go to
  /// one row (reads them; on a GPU this synchronises). Without it a token whose row does not exist is not
  /// appended, a position outside the tables takes their nearest row, and of tokens that go to one row the
  /// last is kept, whole.
  bool check = false;
};

/// Writes the new keys and values into the caches (and their scales, and q_out). Every other byte of the
/// caches stays as it was. The same bits on the CPU and on a GPU. Throws Error before anything is written.
/// execution.workspace is not used.
TANDEM_API void append_kv(const AppendArgs& args, const Execution& execution = {});

/// Arguments of merge: attention of the same queries over disjoint sets of keys.
struct MergeArgs {
  /// One a part: (batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q, head_dim_v), f32, f16 or bf16,
  /// the last dimension contiguous; all of one shape and dtype. Head dimensions are from 1 to 1024.
  std::span<const ConstTensor> outs;
  /// One a part: (batch, heads_q, seqlen_q) or (heads_q, total_q) f32, natural logarithm.
  std::span<const ConstTensor> lses;
  Tensor out;  ///< shape of a part's out, f32, f16 or bf16, written
  Tensor lse;  ///< optional, shape of a part's lse, f32, written
};

/// Writes out = sum of exp(lses[i] - lse) * outs[i], where lse = log(sum of exp(lses[i])): what one call over
/// all the keys gives. A part whose lse is -inf is empty: its out is not read into the result, whatever it
/// holds. Where all parts of a row are empty, out is 0 and lse -inf; where one alone is not, its values are
/// kept as they are. An lse of +inf or NaN makes its row NaN. Throws Error before anything is written.
TANDEM_API void merge(const MergeArgs& args, const Execution& execution = {});

}  // namespace tandem
