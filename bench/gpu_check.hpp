// Whether what a GPU computed may be timed: a sample of its rows against fp64.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/device.hpp"
#include "problem/problem.hpp"

namespace tandem::bench {

/// Compares the results of a finished call, whose operands are `tensors`, by the contract's accuracy rule (8
/// bits: gain and RMS of out); of packed sequences of `lengths` the longest. Returns the largest share of a
/// bound, -1 where the sample does not have such a mask or softcap, or gradients are in 8 bits. Throws Error
/// if a result is wrong.
double check_results(const Problem& problem, Pass pass, const std::vector<gpu::DeviceBuffer>& tensors,
                     const std::vector<std::int64_t>& lengths);

}  // namespace tandem::bench
