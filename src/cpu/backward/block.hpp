// What the backward pass hands to its vector kernel: one block of queries of one head, as plain numbers and
// pointers. Shared by backward.cpp (compiled once) and kernel.cpp (compiled for every instruction
// set), so that nothing here has code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/common/ask_to_stop.hpp"
#include "cpu/functions/program.hpp"
#include "problem/score_options.hpp"
#include "tandem/tensor.hpp"

namespace tandem::cpu {

/// One head of one sequence: row r starts r * row_stride elements after `data`.
struct HeadRows {
  void* data = nullptr;
  std::int64_t row_stride = 0;
};

/// Keys whose terms of a dq are added up in f32, block by block: from a multiple of so many, rounded up to
/// whole blocks, to the next. Those sums are added in f64 (forward/lane_totals.hpp says why).
constexpr std::int64_t backward_run_keys = 4096;

/// Where the gradient of an element that a score function reads is added: in f64, or f32.
struct CapturedGradient {
  void* data = nullptr;  ///< null: it is not wanted
  bool wide = false;     ///< f64
  int rank = 0;
  std::int64_t shape[ConstTensor::max_rank] = {};
  std::int64_t stride[ConstTensor::max_rank] = {};
};

/// By the program's gradients.
struct CapturedGradients {
  CapturedGradient of[Function::max_gradients];
};

/// What scratch sizes depend on.
struct BackwardShape {
  DType dtype = DType::f32;  ///< what q, k, v, out and dout have
  DType dq = DType::f32;     ///< what the gradients have: that dtype, or f32
  DType dk_dv = DType::f32;
  std::int64_t head_dim_qk = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t block_q = 0;         ///< a multiple of BackwardKernel::panel
  std::int64_t block_k = 0;         ///< a multiple of BackwardKernel::strip
  bool functions = false;           ///< the caller has functions ...
  std::int64_t function_words = 0;  ///< ... whose programs need so many words of memory
  bool dropout = false;
  bool captured = false;  ///< gradients of what they read are wanted
};

struct BackwardBlock {
  BackwardShape shape;
  ScoreOptions score;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;

  HeadRows q, k, v, out, dout, lse, dlse;  ///< dlse.data may be null
  HeadRows gated_dout;                     ///< the gradient of out, which is dout but for an output gate
  HeadRows dq, dk, dv;                     ///< no data: that gradient is not wanted
  const float* sink = nullptr;
  double* dsink = nullptr;                   ///< added to, if not null
  const TileFunctions* functions = nullptr;  ///< null: none
  /// Not null: what the function reads gets its gradients, and nothing else is written.
  const CapturedGradients* captured = nullptr;
  std::int64_t batch = 0;  ///< as functions see them
  std::int64_t head = 0;

  std::int64_t block = 0;       ///< queries [block * block_q, (block + 1) * block_q)
  std::int64_t group_head = 0;  ///< which of the query heads that share k and v
  std::int64_t group = 1;

  /// f32 sums of dk and dv for 16-bit outputs, `sum_rows` rows of panels each, of which this sequence has
  /// those from `first_sum_row` on; null: dk and dv hold the sums.
  float* dk_sum = nullptr;
  float* dv_sum = nullptr;
  std::int64_t sum_rows = 0;
  std::int64_t first_sum_row = 0;

  /// One semaphore for each key block if several threads share the sums, else null: how many blocks of
  /// queries have been added.
  std::uint32_t* semaphores = nullptr;
  AskToStop stop = {};
};

/// The kernel of one instruction set.
struct BackwardKernel {
  std::int64_t panel = 0;  ///< queries side by side in lanes
  std::int64_t strip = 0;  ///< keys in a register tile
  std::size_t (*scratch_bytes)(const BackwardShape& shape) = nullptr;
  /// f32 numbers that one row of dk_sum or dv_sum of a head dimension takes.
  std::int64_t (*sum_row)(std::int64_t head_dim) = nullptr;
  void (*run)(const BackwardBlock& block, std::byte* scratch) = nullptr;
};

}  // namespace tandem::cpu
