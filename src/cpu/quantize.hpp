// The quantiser on the CPU.
#pragma once

#include "cpu/cpu.hpp"
#include "problem/quantize_job.hpp"

namespace tandem::cpu {

/// threads 0: OMP_NUM_THREADS, or every core.
void quantize(const QuantizeJob& job, Target target, int threads);

}  // namespace tandem::cpu
