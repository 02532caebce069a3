// The plan of a problem whose tensors are on a GPU.
#pragma once

#include "plan/plan.hpp"

namespace tandem {

/// Throws Error (unsupported) for what the GPU backend cannot run: no driver, no Hopper, another dtype or
/// pass.
Plan plan_gpu(const Problem& problem);

/// Throws Error (unsupported) where the kernels cannot run on that device, or there is no driver.
void check_gpu(int index);

}  // namespace tandem
