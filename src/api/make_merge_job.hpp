// Turns the arguments of merge into a MergeJob.
#pragma once

#include "problem/merge_job.hpp"
#include "tandem/cache.hpp"

namespace tandem {

/// Throws Error (invalid_argument).
MergeJob make_merge_job(const MergeArgs& args);

}  // namespace tandem
