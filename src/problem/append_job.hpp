// What append_kv is about once its arguments have been checked, and where each new token goes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "problem/problem.hpp"

namespace tandem {

/// The longest row of a head that append_kv and merge take.
constexpr std::int64_t max_row = 1024;

/// Operands as in Problem. A cache's batch_stride leads from entry (or page) to entry, its row_stride from
/// row to row of one.
struct AppendJob {
  Device device;
  std::int64_t batch = 0;     ///< sequences; 1 with slot_mapping
  std::int64_t rows_new = 0;  ///< new rows of one batch entry, or of all (packed)
  bool packed = false;
  std::int64_t heads_kv = 0;
  std::int64_t heads_q = 0;
  std::int64_t head_dim_k = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t entries = 0;     ///< entries or pages of the caches
  std::int64_t entry_rows = 0;  ///< rows of each
  Operand k_new, v_new, k_cache, v_cache;
  Operand q, q_out;
  Lengths cu_seqlens_new, seqused_new, cache_seqlens, cache_batch_idx, leftpad_k, slot_mapping;
  Pages pages;
  Scales k_scale, v_scale;  ///< by (batch, kv head)
  Operand cos, sin;         ///< of the rotary embedding, by position; not given if there is none
  std::int64_t positions = 0;
  std::int64_t rotary_dim = 0;
  bool interleaved = false;
  Lengths rotary_offsets;  ///< by sequence, or by token with slot_mapping

  /// New rows of all sequences.
  [[nodiscard]] std::int64_t tokens() const { return packed ? rows_new : batch * rows_new; }
  /// Rows that one sequence of the cache can have; not read with slot_mapping.
  [[nodiscard]] std::int64_t rows_of_sequence() const {
    return pages.given() ? pages.per_sequence * pages.page_size : entry_rows;
  }
};

/// A new row: token `index` of sequence `sequence`, or, with `used` false, of none that is appended.
struct NewToken {
  std::int64_t sequence = 0;
  std::int64_t index = 0;
  bool used = false;
};

/// The token in new row `n` of all. With offsets that do not ascend some token, or none.
inline NewToken new_token(const AppendJob& job, std::int64_t n) {
  if (job.slot_mapping.given()) return {.sequence = 0, .index = n, .used = true};
  NewToken t;
  if (!job.packed) {
    t = {.sequence = n / job.rows_new, .index = n % job.rows_new, .used = true};
  } else if (job.batch > 0) {
    std::int64_t past = job.batch;  // its first row is past n, as that of t.sequence is not
    while (past - t.sequence > 1) {
      const std::int64_t middle = t.sequence + (past - t.sequence) / 2;
      (job.cu_seqlens_new[middle] <= n ? t.sequence : past) = middle;
    }
    const Rows rows = sequence_rows(job.cu_seqlens_new, {}, job.rows_new, t.sequence);
    t.index = n - rows.begin;
    t.used = rows.begin <= n && n < rows.end;
  }
  if (t.used && job.seqused_new.given()) t.used = t.index < job.seqused_new[t.sequence];
  return t;
}

/// The row of the cache that a token goes to, counted over all entries; -1 where there is none for it.
inline std::int64_t slot_of(const AppendJob& job, const NewToken& token) {
  if (!token.used) return -1;
  if (job.slot_mapping.given()) {
    const std::int64_t slot = job.slot_mapping[token.index];
    return slot >= 0 && slot < job.entries * job.entry_rows ? slot : -1;
  }
  const std::int64_t first = job.cache_seqlens[token.sequence];
  if (first < 0 || first >= job.rows_of_sequence() - token.index) return -1;
  std::int64_t row = first + token.index;
  std::int64_t entry = token.sequence;
  if (job.pages.given()) {
    entry = job.pages.entry(token.sequence, row / job.entry_rows);
    row %= job.entry_rows;
  } else if (job.cache_batch_idx.given()) {
    entry = job.cache_batch_idx[token.sequence];
  }
  return entry >= 0 && entry < job.entries ? entry * job.entry_rows + row : -1;
}

/// A token's position as the caller's integers have it, but that it is kept from overflowing.
inline std::int64_t wanted_position(const AppendJob& job, const NewToken& token) {
  constexpr std::int64_t far = std::int64_t{1} << 62;
  if (job.slot_mapping.given()) return job.rotary_offsets[token.index];
  const Lengths& offsets = job.rotary_offsets.given() ? job.rotary_offsets : job.cache_seqlens;
  return std::clamp(offsets[token.sequence], -far, far - 1) + token.index;
}

/// The row of the rotary embedding's tables that a token takes.
inline std::int64_t position_of(const AppendJob& job, const NewToken& token) {
  return std::clamp<std::int64_t>(wanted_position(job, token), 0, job.positions - 1);
}

}  // namespace tandem
