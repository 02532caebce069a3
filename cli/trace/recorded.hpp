// One CTA of a forward kernel, run and written down: in the emulator, or on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "config/trace.hpp"
#include "recording.hpp"
#include "trace/emulated.hpp"

namespace tandem::cli::trace {

struct TracedShape {
  std::int64_t tiles = 1;  ///< tiles of queries, one after the other
  std::int64_t keys = 1024;
};

/// Runs one CTA of the kernel on random values, one head.
emulator::Recording record(const EmulatedKernel& kernel, const TracedShape& shape);

/// Runs such a CTA on every SM of the first GPU, with timestamps, and gives those of one by warp. Throws
/// Error where there is no GPU.
std::vector<std::vector<TraceRecord>> record_on_gpu(const ForwardConfig& config, const TracedShape& shape);

}  // namespace tandem::cli::trace
