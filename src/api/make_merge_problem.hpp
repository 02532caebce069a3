// Turns the arguments of merge into a MergeProblem.
#pragma once

#include "problem/merge_problem.hpp"
#include "tandem/cache.hpp"

namespace tandem {

/// Throws Error (invalid_argument).
MergeProblem make_merge_problem(const MergeArgs& args);

}  // namespace tandem
