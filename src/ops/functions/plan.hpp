// Calls with functions on scores: what they make of a Config that was chosen for the rest of the problem.
#pragma once

#include <string>

#include "ops/forward/config.hpp"
#include "problem/problem.hpp"

namespace tandem {

/// The Config with the problem's functions; without any, as it is.
template <typename Config>
Config with_functions(Config config, const Problem& problem);

/// A line of explain for a problem with functions; `lists`: the kernel visits listed blocks.
std::string explain_gpu_functions(const Problem& problem, bool lists);

}  // namespace tandem
