// What the forward driver (forward.cpp) hands to a forward kernel (forward_kernel.cpp): one tile of queries,
// plain numbers and pointers, so that sources compiled for one instruction set share no inline code with the
// rest.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/ask_to_stop.hpp"
#include "tandem/tensor.hpp"

namespace tandem::cpu {

/// The most keys in a block and the most stripes in a tile: kernels keep small tables of them on the stack.
constexpr int max_block_k = 256;
constexpr int max_stripes = 32;

/// Rows of one sequence and one group of heads: element (row, head, c) is at row * row_stride + head *
/// head_stride + c.
struct GroupRows {
  void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

/// Up to block_q query rows that share a KV head. The rows of all heads of the group are stacked, heads
/// fastest: stacked row x is row x / group of head x % group.
struct ForwardTile {
  DType dtype = DType::f32;
  DType out_dtype = DType::f32;
  int head_dim_qk = 0;
  int head_dim_v = 0;
  int block_q = 0;
  int block_k = 0;

  GroupRows q, out;
  GroupRows lse;  ///< data may be null
  const void* k = nullptr;
  const void* v = nullptr;
  std::int64_t k_stride = 0;
  std::int64_t v_stride = 0;

  std::int64_t group = 1;
  std::int64_t first = 0;  ///< first stacked row
  int count = 0;           ///< stacked rows, at most block_q
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;

  float scale = 1.0F;  ///< of q k, dequantisation included
  float softcap = 0.0F;
  float v_scale = 1.0F;
  const float* sink = nullptr;  ///< of the group's first head
  std::int64_t sink_stride = 0;

  std::byte* scratch = nullptr;  ///< ForwardScratch::bytes, 64-byte aligned
  AskToStop stop = {};
};

/// Query rows (of a KV head, stacked) up to which ShortKernel is the faster one: below, most lanes would be
/// empty.
constexpr int short_rows = 8;
constexpr int short_block_k = 128;

/// Keys whose terms a row adds up in f32, by blocks: from a multiple of so many keys to the next. Those sums
/// are added in f64 (lane_totals.hpp).
constexpr int run_keys = 4096;

/// The pieces of a thread's scratch memory, as offsets in bytes.
struct ForwardScratch {
  std::size_t q = 0;       ///< Q^T, block_q x head_dim_qk words, or short_rows rows of whole registers
  std::size_t out = 0;     ///< O^T, block_q x head_dim_v f32, or two partial results of a short query
  std::size_t scores = 0;  ///< S^T and P^T, block_q x block_k f32
  std::size_t k = 0;       ///< K of one block where it is converted
  std::size_t v = 0;       ///< V of one block where it is converted or paired
  std::size_t rows = 0;    ///< a register's rows on their way into or out of lanes, or a short query's run
  std::size_t maximum = 0;
  std::size_t sum = 0;
  std::size_t first_key = 0;  ///< i64 by lane
  std::size_t last_key = 0;
  std::size_t totals = 0;  ///< of runs of keys: O^T and sum in f64, maximum in f32
  std::size_t bytes = 0;
};

/// Words from one staged row to the next: an odd number of cache lines, so that the same column of
/// consecutive rows does not fall into a few sets of the first-level cache (a stride of 512 bytes uses 8 of
/// its 64).
[[gnu::always_inline]] inline int staged_stride(int columns) {
  return (columns + 15) / 16 / 2 * 32 + 16;
}

/// Numbers in a partial result of a short query, f64, and in its sums of a run of keys, f32: maximum, sum and
/// O of every row.
[[gnu::always_inline]] inline std::size_t short_partial_numbers(std::int64_t head_dim_v) {
  return static_cast<std::size_t>(short_rows * (head_dim_v + 2));
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
    s.bytes += (count * size + 63) / 64 * 64;
    return at;
  };
  const auto bq = static_cast<std::size_t>(block_q);
  const auto bk = static_cast<std::size_t>(block_k);
  const auto dk = static_cast<std::size_t>(head_dim_qk);
  const auto dv = static_cast<std::size_t>(head_dim_v);
  const std::size_t short_q = short_rows * ((dk + 15) / 16 * 16);
  s.q = take(bq * dk > short_q ? bq * dk : short_q, 4);
  const std::size_t partial = short_partial_numbers(head_dim_v);
  s.out = take(bq * dv > 4 * partial ? bq * dv : 4 * partial, 4);
  s.scores = take(bq * bk, 4);
  s.k = take(bk * static_cast<std::size_t>(staged_stride(head_dim_qk)), 4);
  s.v = take(bk * static_cast<std::size_t>(staged_stride(head_dim_v)), 4);
  const std::size_t rows = 16 * (dk > dv ? dk : dv);
  s.rows = take(rows > partial ? rows : partial, 4);
  s.maximum = take(bq, 4);
  s.sum = take(bq, 4);
  s.first_key = take(bq, 8);
  s.last_key = take(bq, 8);
  // Short sequences leave them untouched: memory goes by tiles and threads, not by lengths.
  s.totals = take(totals_bytes(block_q, head_dim_v), 1);
  return s;
}

/// The forward pass for one instruction set.
struct ForwardKernel {
  int stripe = 0;  ///< lanes that one register tile covers; block_q is a multiple of it
  void (*run)(const ForwardTile& tile) = nullptr;
};

/// ForwardKernel for tiles of at most short_rows rows. A partial result is short_partial_numbers() numbers.
struct ShortKernel {
  /// The partial result of keys [begin, end).
  void (*attend)(const ForwardTile& tile, std::int64_t begin, std::int64_t end, double* partial) = nullptr;
  /// Adds partial result `next` to `total`.
  void (*fold)(const ForwardTile& tile, double* total, const double* next) = nullptr;
  /// Writes out and lse.
  void (*finish)(const ForwardTile& tile, const double* total) = nullptr;
};

}  // namespace tandem::cpu
