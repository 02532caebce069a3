// The backward pass, and what it decides once a call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/backward/block.hpp"
#include "cpu/backward/captured_gradients.hpp"
#include "cpu/backward/chosen.hpp"
#include "cpu/common/config.hpp"
#include "cpu/common/stop.hpp"
#include "cpu/functions/functions.hpp"
#include "problem/problem.hpp"

namespace tandem::cpu {

struct Plan;

/// Queries and keys of a tile, the same for every dtype, head dimension and instruction set: 256 x 192 is
/// within 2 % of the best of 128 to 384 x 96 to 288 at head dimensions 64, 128 and 256, in f32 and bf16.
constexpr int backward_block_q = 256;
constexpr int backward_block_k = 192;

/// Which kv heads are shared among threads, and where everything lies in the workspace.
struct BackwardSchedule {
  std::int64_t heads = 0;   ///< kv heads of all sequences
  std::int64_t shared = 0;  ///< the last ones, whose items any thread takes
  std::int64_t whole = 0;   ///< the others: one thread each

  std::size_t scratch_bytes = 0;  ///< what a thread needs
  std::int64_t at_work = 0;       ///< kv heads at the same time, at most
  std::int64_t area_rows = 0;     ///< rows of sums of dk and dv; 0 where these hold the sums
  std::int64_t areas = 0;
  std::int64_t dk_sum_row = 0;  ///< floats
  std::int64_t dv_sum_row = 0;
  std::int64_t semaphores = 0;  ///< per shared kv head: one a block of keys, and one for dsink

  std::size_t sums_at = 0, semaphores_at = 0, dsink_at = 0, order_at = 0, captured_at = 0, total = 0;
};

struct BackwardPlan {
  BackwardShape shape;
  CapturedSchedule captured;
  BackwardSchedule schedule = {};
  ChosenSchedule chosen = {};  ///< in place of the schedule where queries choose their keys
  /// threads * tile, with tile about 4 * (block_q * 7 + block_k * 3) * head_dim + 8 * block_q * block_k; for
  /// f16 and bf16 also f32 sums of dk and dv, 4 * rows_k * (head_dim_qk + head_dim_v), for each (batch, kv
  /// head) at work at the same time, of which there are at most min(batch * heads_kv, 3 * threads); where
  /// keys are packed, and rows_k is that of all sequences, at most min(heads_kv, 3 * threads) times.
  std::size_t workspace_bytes = 0;
};

/// `functions` may be null.
BackwardPlan plan_backward(const Problem& problem, const Config& config, const CallFunctions* functions);
/// `problem` is that of the plan, with all addresses.
void backward(const Plan& plan, const Problem& problem, std::byte* workspace, Stop* stop);

/// Writes dsink, if it is wanted: the sums over batch entries of `parts`, by (batch, query head).
void add_up_dsink(const Problem& problem, const double* parts);

}  // namespace tandem::cpu
