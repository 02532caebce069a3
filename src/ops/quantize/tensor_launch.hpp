// From a call to tandem::quantize, one tensor in the caller's layout, to what its kernels are launched with.
// Pure: needs no driver, so that the emulator's tests use it too.
#pragma once

#include "gpu/workspace.hpp"
#include "ops/quantize/config.hpp"
#include "problem/quantize_problem.hpp"

namespace tandem::gpu {

/// What the mean and the scales of a head or a tensor take on the way: linear in rows / 128.
Workspace tensor_workspace(const QuantizeProblem& problem);

/// Blocks of rows of all heads. A head without rows has a scale and a mean too: one work item finds them.
std::int64_t tensor_items(const QuantizeProblem& problem);

/// x takes k's place. `memory` is 16-byte aligned memory of `workspace`, tensor_workspace's, with counters of
/// 0.
QuantizeParams make_tensor_params(const QuantizeProblem& problem, const Workspace& workspace, char* memory);

}  // namespace tandem::gpu
