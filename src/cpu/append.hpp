// append_kv on the CPU.
#pragma once

#include "cpu/cpu.hpp"
#include "problem/append_job.hpp"

namespace tandem::cpu {

/// threads 0: OMP_NUM_THREADS, or every core.
void append(const AppendJob& job, Target target, int threads);

}  // namespace tandem::cpu
