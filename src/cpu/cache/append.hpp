// append_kv on the CPU.
#pragma once

#include "cpu/targets/target.hpp"
#include "problem/append_problem.hpp"

namespace tandem::cpu {

/// threads 0: OMP_NUM_THREADS, or every core.
void append(const AppendProblem& problem, Target target, int threads);

}  // namespace tandem::cpu
