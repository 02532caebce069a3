// The plan of a problem whose tensors are on a GPU.
#pragma once

#include "ops/plan.hpp"

namespace tandem {

/// Throws Error (unsupported) for what the GPU backend cannot run: no driver, no Hopper, another dtype or
/// pass. `wanted` takes the place of the main kernel's Config, for those that compare Configs; of the kind
/// that the problem has. `sm_limit`: Execution's.
Plan plan_gpu(const Problem& problem, const gpu::KernelConfig* wanted = nullptr, int sm_limit = 0);

/// Plans a call to quantize, on the GPU of its tensors.
gpu::QuantizeSteps plan_quantize(const QuantizeProblem& problem);

/// Plan calls to append_kv and merge, on the GPU of their tensors.
gpu::AppendSteps plan_append(const AppendProblem& problem);
gpu::MergeSteps plan_merge(const MergeProblem& problem);

/// Throws Error (unsupported) where the kernels cannot run on that device, or there is no driver.
void check_gpu(int index);

}  // namespace tandem
