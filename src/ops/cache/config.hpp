// What host and device share of the kernels that write to caches and merge parts. Plain aggregates, as in
// config/types.hpp.
#pragma once

#include "config/types.hpp"

namespace tandem {

/// Element types of rows in memory.
enum class Stored : int { f32, f16, bf16, e4m3, s8 };

constexpr int stored_bytes(Stored type) {
  return type == Stored::f32 ? 4 : type == Stored::e4m3 || type == Stored::s8 ? 1 : 2;
}

struct AppendConfig {
  Stored from = Stored::bf16;  ///< type of new rows (and q)
  Stored to = Stored::bf16;    ///< type of the cache; both are the same if they have 8 bits
  bool rotary = false;         ///< keys (and q) get a rotary embedding
  bool interleaved = false;    ///< the embedding's pairs are neighbouring channels
  bool f32_tables = true;      ///< the embedding's tables are f32; else of type `from`
  bool vectors = true;         ///< rows, caches and tables allow 16-byte accesses (8-byte ones of codes)
  bool finds_scales = false;   ///< each row and head of K or V has a scale, which is found

  constexpr bool operator==(const AppendConfig&) const = default;
};

constexpr int append_threads = 256;
/// Thread blocks that an SM has registers for: an embedding takes most, and so do scales that are found.
constexpr int append_blocks_per_sm(const AppendConfig& c) {
  if (c.rotary) return c.from == c.to ? 3 : 2;
  return c.finds_scales ? 3 : 4;
}
/// The longest run of rows of the cache, as a power of two: a row for each warp.
constexpr int append_longest_run = 2;
/// Words of bits, one for each run of a stretch or for each of 32 slots, that a thread block notes before it
/// writes what is its own.
constexpr int append_words = 2048;
/// Dynamic shared memory: the words, and for each warp what its lanes find.
constexpr int append_shared_bytes = 4 * append_words + append_threads / 32 * (64 * 8 + 32 * 32);

/// A tensor of new rows and the cache that they go to; or q and q_out.
struct AppendTensor {
  const void* rows;  ///< null: no such tensor
  Strides row_stride;
  void* cache;
  Strides cache_stride;  ///< batch: from entry (or page) to entry
  const float* scales;   ///< scales of quantized values; null stands for 1
  long long scale_batch;
  long long scale_head;
  long long scale_row;  ///< from token to token of a sequence, where `rows` are codes
  int columns;
};

/// Scales by row and head of a cache, f32, addressed as the cache is.
struct FoundScales {
  float* data;  ///< null: none are found
  Strides stride;
};

struct AppendParams {
  AppendTensor k, v, q;
  LengthArray cu_seqlens_new, seqused_new, cache_seqlens, cache_batch_idx, slot_mapping, rotary_offsets;
  LengthArray page_table;  ///< stride from page to page of a sequence
  long long page_table_batch;
  const void* cos;
  const void* sin;
  long long cos_stride;
  long long sin_stride;
  long long positions;
  long long entries;
  long long entry_rows;
  long long rows_of_sequence;
  int rotary_dim;
  int batch;
  int tokens;
  int rows_new;
  int heads_kv;
  int heads_q;
  bool packed;
  int run_shift;      ///< a run has 2^run_shift rows of an entry
  int stretch_shift;  ///< and a stretch 2^stretch_shift of them, 32 runs at most
  int words;          ///< stretches of all sequences, as many as their new rows can touch; or of 32 slots
  int teams;          ///< teams of blocks that share the words
  long long runs_of_entry;
  FoundScales k_found, v_found;  ///< read if the Config says so
};

/// Merges rows of parts.
struct MergeConfig {
  Stored from = Stored::f32;
  Stored to = Stored::bf16;
  bool vectors = true;  ///< rows of the parts and of out allow accesses of 4 elements

  constexpr bool operator==(const MergeConfig&) const = default;
};

constexpr int merge_threads = 256;
/// Parts that may lie anywhere; any number may lie at even distances.
constexpr int merge_most_parts = 64;

struct MergeParams {
  const void* outs[merge_most_parts];
  const float* lses[merge_most_parts];
  long long out_step;  ///< elements from part to part where `even`, from the first
  long long lse_step;
  Strides part_stride;      ///< strides of a part's out
  Strides part_lse_stride;  ///< strides of a part's lse
  void* out;
  Strides out_stride;
  float* lse;  ///< may be null
  Strides lse_stride;
  long long count;  ///< rows of all heads
  int rows;
  int heads;
  int columns;
  int parts;
  bool even;
};

}  // namespace tandem
