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
struct AppendProblem {
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
  Scales k_scale, v_scale;               ///< by (batch, kv head), and by new row where group_stride is not 0
  Operand k_scale_cache, v_scale_cache;  ///< f32, addressed as the caches: scales that are found by row
  Operand cos, sin;                      ///< the rotary embedding's, by position; not given if there is none
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

/// The token in new row `n` of all. With offsets that do not ascend some token, or none; a GPU may take it as
/// several.
inline NewToken new_token(const AppendProblem& problem, std::int64_t n) {
  if (problem.slot_mapping.given()) return {.sequence = 0, .index = n, .used = true};
  NewToken t;
  if (!problem.packed) {
    t = {.sequence = n / problem.rows_new, .index = n % problem.rows_new, .used = true};
  } else if (problem.batch > 0) {
    std::int64_t past = problem.batch;  // its first row is past n, as that of t.sequence is not
    while (past - t.sequence > 1) {
      const std::int64_t middle = t.sequence + (past - t.sequence) / 2;
      (problem.cu_seqlens_new[middle] <= n ? t.sequence : past) = middle;
    }
    const Rows rows = sequence_rows(problem.cu_seqlens_new, {}, problem.rows_new, t.sequence);
    t.index = n - rows.begin;
    t.used = rows.begin <= n && n < rows.end;
  }
  if (t.used && problem.seqused_new.given()) t.used = t.index < problem.seqused_new[t.sequence];
  return t;
}

/// The row of the cache that a token goes to, counted over all entries; -1 where there is none for it.
inline std::int64_t slot_of(const AppendProblem& problem, const NewToken& token) {
  if (!token.used) return -1;
  if (problem.slot_mapping.given()) {
    const std::int64_t slot = problem.slot_mapping[token.index];
    return slot >= 0 && slot < problem.entries * problem.entry_rows ? slot : -1;
  }
  const std::int64_t first = problem.cache_seqlens[token.sequence];
  if (first < 0 || first >= problem.rows_of_sequence() - token.index) return -1;
  std::int64_t row = first + token.index;
  std::int64_t entry = token.sequence;
  if (problem.pages.given()) {
    entry = problem.pages.entry(token.sequence, row / problem.entry_rows);
    row %= problem.entry_rows;
  } else if (problem.cache_batch_idx.given()) {
    entry = problem.cache_batch_idx[token.sequence];
  }
  return entry >= 0 && entry < problem.entries ? entry * problem.entry_rows + row : -1;
}

/// A token's position as the caller's integers have it, but that it is kept from overflowing.
inline std::int64_t wanted_position(const AppendProblem& problem, const NewToken& token) {
  constexpr std::int64_t far = std::int64_t{1} << 62;
  if (problem.slot_mapping.given()) return problem.rotary_offsets[token.index];
  const Lengths& offsets = problem.rotary_offsets.given() ? problem.rotary_offsets : problem.cache_seqlens;
  return std::clamp(offsets[token.sequence], -far, far - 1) + token.index;
}

/// The row of the rotary embedding's tables that a token takes.
inline std::int64_t position_of(const AppendProblem& problem, const NewToken& token) {
  return std::clamp<std::int64_t>(wanted_position(problem, token), 0, problem.positions - 1);
}

}  // namespace tandem
