// merge on the CPU.
#pragma once

#include "cpu/targets/target.hpp"
#include "problem/merge_problem.hpp"

namespace tandem::cpu {

/// threads 0: OMP_NUM_THREADS, or every core.
void merge(const MergeProblem& problem, Target target, int threads);

}  // namespace tandem::cpu
