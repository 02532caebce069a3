// The backward pass of queries that choose their keys (Problem::indices).
#pragma once

#include <cstddef>

#include "cpu/backward/block.hpp"
#include "cpu/common/config.hpp"
#include "cpu/common/stop.hpp"
#include "problem/problem.hpp"

namespace tandem::cpu {

struct Plan;

/// Where everything lies in the workspace.
struct ChosenSchedule {
  /// A thread has, behind the kernel's scratch memory, the keys of one query, their rows, their gradients in
  /// f32, and the kernel's sums of these.
  std::size_t keys_at = 0, k_at = 0, v_at = 0, dk_at = 0, dv_at = 0, sums_at = 0, thread_bytes = 0;
  std::int64_t sum_rows = 0;  ///< 0: the gradients hold the sums
  std::int64_t dk_sum_row = 0, dv_sum_row = 0;
  /// All share f32 gradients of 16-bit k and v, which queries have been added to them, and dsink's sums.
  std::size_t dk_all_at = 0, dv_all_at = 0, added_at = 0, dsink_at = 0, total = 0;
};

ChosenSchedule schedule_chosen(const Problem& problem, const Config& config, const BackwardShape& shape);
/// `problem` is that of the plan, with all addresses.
void backward_of_chosen(const Plan& plan, const Problem& problem, std::byte* workspace, Stop* stop);

}  // namespace tandem::cpu
