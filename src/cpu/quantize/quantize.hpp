// The quantiser on the CPU.
#pragma once

#include "cpu/common/stop.hpp"
#include "cpu/targets/target.hpp"
#include "problem/quantize_problem.hpp"

namespace tandem::cpu {

/// threads 0: OMP_NUM_THREADS, or every core. Once `stop` (may be null) wants the end, the rest of the
/// outputs is left as it is.
void quantize(const QuantizeProblem& problem, Target target, int threads, Stop* stop = nullptr);

}  // namespace tandem::cpu
