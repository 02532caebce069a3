// The quantiser on the CPU.
#pragma once

#include "api/quantize_job.hpp"
#include "cpu/cpu.hpp"

namespace tandem::cpu {

/// threads 0: OMP_NUM_THREADS, or every core.
void quantize(const QuantizeJob& job, Target target, int threads);

}  // namespace tandem::cpu
