// The forward kernel with timestamps, on a GPU.
#pragma once

#include <vector>

#include "config/trace.hpp"
#include "gpu/kernel_spec.hpp"
#include "problem/problem.hpp"

namespace tandem::gpu {

/// The kernel of `config` that writes timestamps.
KernelName traced_kernel_name(const ForwardConfig& config);

/// Runs it twice with `blocks` thread blocks, the first time to load the instruction cache, and gives what
/// the warps of block 0 wrote at the second. The problem's tensors are on a GPU, as TMA can read them, and
/// its tiles come from the static scheduler. Waits for the GPU. Throws Error: unsupported where the Config
/// leaves no shared memory for the records' counters, runtime where a warp has more records than fit.
std::vector<std::vector<TraceRecord>> run_traced(const Problem& problem, const ForwardConfig& config,
                                                 unsigned int blocks);

}  // namespace tandem::gpu
