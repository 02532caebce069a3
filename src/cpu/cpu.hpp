// The CPU backend: blocked online softmax, vectorised, threaded. A Plan is made once a call; run() does what
// it says, and explain and workspace_bytes read it.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <variant>

#include "cpu/backward/backward.hpp"
#include "cpu/common/config.hpp"
#include "cpu/common/stop.hpp"
#include "cpu/eight_bit/forward.hpp"
#include "cpu/forward/forward.hpp"
#include "cpu/functions/functions.hpp"
#include "problem/problem.hpp"

namespace tandem::cpu {

/// A call, decided.
struct Plan {
  /// Reads no lengths and no tensor, and allocates nothing.
  Plan(const Problem& call, int threads);
  /// As `chosen` says; the problem is not mixed with scales by block or row.
  Plan(const Problem& call, const Config& chosen);

  /// What the kernels see. Of a mixed call K and V are in the dtype of Q, at the start of the workspace,
  /// whose address `run` fills in.
  Problem problem;
  std::optional<Problem> mixed;  ///< a mixed call as it was asked for, whose K and V are dequantized first
  Config config;
  std::optional<CallFunctions> functions;
  std::variant<ForwardPlan, EightBitPlan, BackwardPlan> pass;
  /// Where the scratch memory of the pass begins: behind dequantized K and V, or gradients that are added
  /// and that of O before a gate.
  std::size_t copied_bytes = 0;
  std::size_t workspace_bytes = 0;  ///< grows with threads times tile, never with seqlen squared
};

/// Once `stop` is wanted this returns as it is, and outputs hold anything.
void run(const Plan& plan, std::span<std::byte> workspace, Stop* stop = nullptr);

}  // namespace tandem::cpu
