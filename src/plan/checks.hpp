// What the kernels of a GPU cannot do: each throws Error (unsupported) with what to do.
#pragma once

#include "plan/facts.hpp"

namespace tandem {

/// What no kernel can do, on whatever GPU, with or without a driver.
void check_problem(const Problem& asked);

/// What those cannot do that the GPU and the problem take. `sm_limit` is Execution's.
void check_family(const Problem& asked, const CallFacts& facts, int sm_limit);

}  // namespace tandem
