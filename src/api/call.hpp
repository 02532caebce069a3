// A call between its parts: checked and planned, then run. For callers that need the plan in between, to
// bring scratch memory of their own without planning twice.
#pragma once

#include "api/make_problem.hpp"
#include "ops/plan.hpp"
#include "tandem/attention.hpp"

namespace tandem {

struct Call {
  Problem problem;
  Plan plan;

  /// Checks the arguments and plans. Throws what forward and backward throw before they write. The workspace
  /// of `execution` is not looked at: see run().
  Call(const ForwardArgs& args, const Execution& execution, Memory memory);
  Call(const BackwardArgs& args, const Execution& execution, Memory memory);
};

/// The workspace that a call of Memory::described needs, whichever of its tensors without an address are one:
/// v may be the first columns of k, and queries and keys may have the same lengths.
std::size_t described_bytes(const Call& call, const Execution& execution);

/// Runs a call of Memory::present. Of `execution` the stream, the workspace and what
/// interrupts count here.
void run(const Call& call, const Execution& execution);

}  // namespace tandem
