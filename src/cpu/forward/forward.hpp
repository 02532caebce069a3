// The forward pass, and what it decides once a call, whatever the lengths of its sequences.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/common/config.hpp"
#include "cpu/common/stop.hpp"
#include "cpu/forward/tile.hpp"
#include "cpu/functions/functions.hpp"
#include "problem/problem.hpp"

namespace tandem::cpu {

struct Plan;

/// Sequences of few query rows, as in decoding (decode/decode.cpp).
struct DecodePlan {
  bool possible = false;         ///< a sequence may have so few
  std::int64_t most_splits = 0;  ///< splits that a sequence's keys have at most
  std::int64_t heads = 1;        ///< KV heads that a thread attends to side by side
  std::int64_t head_groups = 0;
  std::size_t partial_numbers = 0;  ///< f64, of all splits that threads share; 0: they share none
  std::size_t scratch_bytes = 0;    ///< what a thread needs
};

/// Calls with a split size and few tiles, whose runs of keys threads share (split.cpp).
struct SplitPlan {
  KeyRuns runs;
  std::size_t run_numbers = 0;  ///< floats: the sums of one run of a tile
  std::int64_t most_tiles = 0;  ///< tiles that all heads have at most
  std::size_t sum_numbers = 0;  ///< floats: room for all sums; 0: a thread computes whole tiles
};

struct ForwardPlan {
  DecodePlan decode;
  SplitPlan split;
  std::size_t scratch_bytes = 0;    ///< what a thread needs
  std::size_t chosen_at = 0;        ///< there the keys that a query has chosen
  std::size_t workspace_bytes = 0;  ///< alignment included
};

/// `functions` may be null.
ForwardPlan plan_forward(const Problem& problem, const Config& config, const CallFunctions* functions);
/// A head's rows from `row` on, of an LSE, max_logits or gate that may not be given.
GroupRows row_numbers(const Operand& x, std::int64_t batch, std::int64_t row, std::int64_t head);
/// `problem` is that of the plan, with all addresses.
void forward(const Plan& plan, const Problem& problem, std::byte* workspace, Stop* stop);

}  // namespace tandem::cpu
