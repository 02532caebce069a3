// What the forward driver (forward.cpp) hands to a forward kernel (kernel.cpp): one tile of queries,
// plain numbers and pointers, so that sources compiled for one instruction set share no inline code with the
// rest.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/common/ask_to_stop.hpp"
#include "cpu/common/workspace.hpp"
#include "cpu/functions/program.hpp"
#include "problem/score_options.hpp"
#include "tandem/tensor.hpp"

namespace tandem::cpu {

/// The most keys in a block and the most stripes in a tile: kernels keep small tables of them on the stack.
constexpr int max_block_k = 256;
constexpr int max_stripes = 32;
constexpr std::size_t max_stripe_lanes = 64;

/// Rows of one sequence and one group of heads: element (row, head, c) is at row * row_stride + head *
/// head_stride + c.
struct GroupRows {
  void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

/// What is read in place of a row of K or V that the page table places in no page: as long as any row.
alignas(64) inline constexpr unsigned char zero_row[sizeof(float) * 1024] = {};

/// The pages of one sequence where k and v are a cache in pages: tandem::Pages for kernels.
struct TilePages {
  const void* table = nullptr;  ///< the sequence's page numbers; null: keys are rows at even distances
  bool wide = false;
  std::int64_t stride = 1;
  std::int64_t page_size = 1;
  std::int64_t count = 0;
  std::int64_t first_row = 0;  ///< the sequence's first row that takes part
  std::int64_t k_stride = 0;   ///< from page to page
  std::int64_t v_stride = 0;
  /// The row of each key, counted from that first one, where a query has chosen them; null: key i is row i.
  const std::int64_t* chosen = nullptr;
};

/// Scales by row of k or v of a head: that of a row is at row_stride, and at page_stride for its page.
struct TileScales {
  const float* data = nullptr;  ///< from the first row that takes part on, or the first page; null: none
  std::int64_t row_stride = 0;
  std::int64_t page_stride = 0;
};

/// Up to block_q query rows that share a KV head. The rows of all heads of the group are stacked, heads
/// fastest: stacked row x is row x / group of head x % group. Its scale includes dequantisation but for
/// scales by row.
struct ForwardTile : ScoreOptions {
  DType dtype = DType::f32;      ///< the dtype of q
  DType key_dtype = DType::f32;  ///< the dtype of k and v: that of q, e4m3 or s8
  DType out_dtype = DType::f32;
  int head_dim_qk = 0;
  int head_dim_v = 0;
  int block_q = 0;
  int block_k = 0;

  GroupRows q, out;
  GroupRows lse, max_logits;  ///< data may be null
  GroupRows gate;             ///< likewise; of q's dtype
  const void* k = nullptr;
  const void* v = nullptr;
  std::int64_t k_stride = 0;
  std::int64_t v_stride = 0;
  TilePages pages;
  TileScales k_scales;
  TileScales v_scales;

  std::int64_t group = 1;
  std::int64_t first = 0;  ///< first stacked row
  int count = 0;           ///< stacked rows, at most block_q
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;

  /// Keys of a split (Problem::split_size); 0: off. With it no row's bits depend on the others of its tile.
  std::int64_t split_size = 0;

  float v_scale = 1.0F;
  const float* sink = nullptr;  ///< the sink of the group's first head
  std::int64_t sink_stride = 0;

  const TileFunctions* functions = nullptr;  ///< null: the caller has none
  std::int64_t batch = 0;                    ///< as functions see them
  std::int64_t head = 0;                     ///< the group's first query head

  /// ForwardScratch::bytes, 64-byte aligned; with functions those of FunctionScratch follow.
  std::byte* scratch = nullptr;
  AskToStop stop = {};
};

/// Query rows (of a KV head, stacked) up to which ShortKernel is the faster one: below, most lanes would be
/// empty.
constexpr int short_rows = 8;
/// KV heads that a thread attends to side by side, block of keys after block of keys, where a cache holds the
/// heads of a key next to one another: it then reads memory from front to back.
constexpr int short_heads = 8;

/// The most keys whose terms a row adds up in f32, by blocks. Those sums are added in f64 (lane_totals.hpp).
constexpr int run_keys = 4096;

/// Where the keys of a sequence are cut into such runs: at multiples of run_keys, or with a split size at its
/// multiples, and splits of more than run_keys keys into even parts. Every cut is between blocks.
struct KeyRuns {
  std::int64_t split = run_keys;
  std::int64_t parts = 1;        ///< runs that a split has
  std::int64_t size = run_keys;  ///< keys of each, but for the last

  /// The run that has `key`, and the keys [begin, end) of run `i`.
  [[nodiscard, gnu::always_inline]] std::int64_t at(std::int64_t key) const {
    return key / split * parts + key % split / size;
  }
  [[nodiscard, gnu::always_inline]] std::int64_t begin(std::int64_t i) const {
    return i / parts * split + i % parts * size;
  }
  [[nodiscard, gnu::always_inline]] std::int64_t end(std::int64_t i) const { return begin(i + 1); }
};

[[gnu::always_inline]] inline KeyRuns key_runs(std::int64_t split_size, std::int64_t block_k) {
  if (split_size == 0) return {};
  KeyRuns runs{.split = split_size, .parts = (split_size + run_keys - 1) / run_keys, .size = split_size};
  const std::int64_t even = (split_size + runs.parts - 1) / runs.parts;
  runs.size = (even + block_k - 1) / block_k * block_k;
  return runs;
}

/// The pieces of a thread's scratch memory, as offsets in bytes.
struct ForwardScratch {
  std::size_t q = 0;       ///< Q^T, block_q x in_tiles(head_dim_qk) words
  std::size_t out = 0;     ///< O^T, block_q x in_tiles(head_dim_v) f32
  std::size_t scores = 0;  ///< S^T and P^T of a stripe and a block, f32, or what TileStream has there
  std::size_t k = 0;       ///< K of one block where it is converted
  std::size_t v = 0;       ///< V of one block where it is converted or paired
  std::size_t rows = 0;    ///< a register's rows on their way into or out of lanes
  std::size_t maximum = 0;
  std::size_t sum = 0;
  std::size_t largest = 0;
  std::size_t first_key = 0;  ///< i64 by lane
  std::size_t last_key = 0;
  std::size_t totals = 0;  ///< totals of runs of keys: O^T and sum in f64, maximum in f32
  std::size_t bytes = 0;
};

/// Words from one staged row to the next: an odd number of cache lines, so that the same column of
/// consecutive rows does not fall into a few sets of the first-level cache (a stride of 512 bytes uses 8 of
/// its 64).
[[gnu::always_inline]] inline int staged_stride(int columns) {
  return (columns + 15) / 16 / 2 * 32 + 16;
}

/// Columns rounded up to whole tiles of a matrix unit, whose tiles reach across the last one.
[[gnu::always_inline]] inline int in_tiles(int columns) {
  return (columns + 31) / 32 * 32;
}

/// Bytes of the totals of `rows` rows.
[[gnu::always_inline]] inline std::size_t totals_bytes(int rows, int head_dim_v) {
  return static_cast<std::size_t>(rows) *
         ((static_cast<std::size_t>(head_dim_v) + 1) * sizeof(double) + sizeof(float));
}

[[gnu::always_inline]] inline ForwardScratch forward_scratch(int block_q, int block_k, int head_dim_qk,
                                                             int head_dim_v) {
  ForwardScratch s;
  const auto take = [&s](std::size_t count, std::size_t size) {
    const std::size_t at = s.bytes;
    s.bytes += whole_lines(count * size);
    return at;
  };
  const auto bq = static_cast<std::size_t>(block_q);
  const auto bk = static_cast<std::size_t>(in_tiles(block_k));
  const auto dk = static_cast<std::size_t>(head_dim_qk);
  const auto dv = static_cast<std::size_t>(head_dim_v);
  const std::size_t tiled_k = static_cast<std::size_t>(in_tiles(head_dim_qk));
  const std::size_t tiled_v = static_cast<std::size_t>(in_tiles(head_dim_v));
  const auto staged = [](int columns, std::size_t tiled) {
    const auto stride = static_cast<std::size_t>(staged_stride(columns));
    return stride > tiled ? stride : tiled;
  };
  s.q = take(bq * tiled_k, 4);
  s.out = take(bq * tiled_v, 4);
  s.scores = take(max_stripe_lanes * (bk + 64), 4);
  s.k = take(bk * staged(head_dim_qk, tiled_k), 4);
  s.v = take(bk * staged(head_dim_v, tiled_v), 4);
  s.rows = take(16 * (dk > dv ? dk : dv), 4);
  s.maximum = take(bq, 4);
  s.sum = take(bq, 4);
  s.largest = take(bq, 4);
  s.first_key = take(bq, 8);
  s.last_key = take(bq, 8);
  // Short sequences leave them untouched: memory goes by tiles and threads, not by lengths.
  s.totals = take(totals_bytes(block_q, head_dim_v), 1);
  return s;
}

/// What functions need behind ForwardScratch, as offsets in bytes from there.
struct FunctionScratch {
  std::size_t memory = 0;  ///< what a program works in
  std::size_t rows = 0;    ///< MaskedRows (function.hpp) of every register of the tile
  std::size_t seen = 0;    ///< a word of lanes for each register and key of a block
  std::size_t bytes = 0;
};
constexpr int least_lanes = 4;         ///< lanes of a register, at least, whatever the instruction set
constexpr int masked_rows_bytes = 16;  ///< the size of a MaskedRows
/// Words of lanes from one register of rows to the next. Lanes are read eight bytes at a time.
[[gnu::always_inline]] inline int seen_stride(int block_k) {
  return block_k + 8;
}

[[gnu::always_inline]] inline FunctionScratch function_scratch(std::int64_t words, int block_q, int block_k) {
  const auto registers = static_cast<std::size_t>(block_q / least_lanes);
  FunctionScratch s;
  s.rows = whole_lines(static_cast<std::size_t>(words) * sizeof(float));
  s.seen = s.rows + whole_lines(registers * masked_rows_bytes);
  s.bytes = s.seen +
            whole_lines(registers * static_cast<std::size_t>(seen_stride(block_k)) * sizeof(std::uint16_t));
  return s;
}

/// The forward pass for one instruction set.
struct ForwardKernel {
  int stripe = 0;  ///< lanes that one register tile covers; block_q is a multiple of it
  void (*run)(const ForwardTile& tile) = nullptr;
  /// With a split size a tile may run in pieces: `attend` leaves the sums of one run of keys,
  /// split_sum_numbers() floats, and `finish` adds those of runs [0, runs), `stride` floats from one to the
  /// next, and writes out, lse and max_logits.
  void (*attend)(const ForwardTile& tile, std::int64_t run, float* sums) = nullptr;
  void (*finish)(const ForwardTile& tile, std::int64_t runs, float* sums, std::size_t stride) = nullptr;
};

/// Floats of the sums of `rows` rows, a multiple of ForwardKernel::stripe: O, sum, maximum and largest score.
[[gnu::always_inline]] inline std::size_t split_sum_numbers(std::int64_t rows, std::int64_t head_dim_v) {
  return static_cast<std::size_t>(rows * (head_dim_v + 3));
}

/// Numbers in a partial result of a short query, f64, and in its sums of a run of keys, f32: maximum, sum and
/// O of every row.
[[gnu::always_inline]] inline std::size_t short_partial_numbers(std::int64_t head_dim_v) {
  return static_cast<std::size_t>(short_rows * (head_dim_v + 2));
}

/// The pieces of the scratch memory that a short query has for each KV head, as offsets in bytes.
struct ShortScratch {
  std::size_t q = 0;        ///< short_rows rows of whole registers
  std::size_t sums = 0;     ///< sums of a run of keys, later O of a row; f32
  std::size_t partial = 0;  ///< two partial results
  std::size_t bytes = 0;
};

[[gnu::always_inline]] inline ShortScratch short_scratch(int head_dim_qk, int head_dim_v) {
  const auto columns = static_cast<std::size_t>(in_tiles(head_dim_qk));
  const std::size_t numbers = short_partial_numbers(head_dim_v);
  ShortScratch s;
  s.sums = short_rows * columns * sizeof(float);
  s.partial = s.sums + whole_lines(numbers * sizeof(float));
  s.bytes = s.partial + 2 * whole_lines(numbers * sizeof(double));
  return s;
}

/// ForwardKernel for tiles of at most short_rows rows, whose scratch is a ShortScratch. A partial result is
/// short_partial_numbers() numbers.
/// Keys [begin, end) of a split.
struct SplitKeys {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  /// This thread goes on with keys up to here, whose first block is fetched beside the last one of these.
  std::int64_t next_end = 0;
  bool fetched = false;  ///< the first block of these has been
};

struct ShortKernel {
  /// The partial results of a split for `heads` tiles, which are KV heads of one sequence that differ in
  /// nothing but where their rows lie and in their scales: tile i's goes to partials + i * stride.
  void (*attend)(const ForwardTile* tiles, int heads, const SplitKeys& keys, double* partials,
                 std::int64_t stride) = nullptr;
  /// Adds partial result `next` to `total`.
  void (*fold)(const ForwardTile& tile, double* total, const double* next) = nullptr;
  /// Writes out, lse and max_logits.
  void (*finish)(const ForwardTile& tile, const double* total) = nullptr;
};

}  // namespace tandem::cpu
