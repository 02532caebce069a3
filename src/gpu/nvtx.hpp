// Ranges in the timelines of Nsight Systems and Nsight Compute: the part of NVTX 3's interface between a
// program and the tool that watches it. A tool names its library in NVTX_INJECTION64_PATH; without one a
// range is nothing.
#pragma once

#include <string>

namespace tandem::gpu {

/// Whether a tool takes ranges. Asked once a process.
bool ranges_are_watched() noexcept;

/// Begins a range on this thread, and ends the innermost one. Only where ranges_are_watched().
void begin_range(const std::string& name) noexcept;
void end_range() noexcept;

}  // namespace tandem::gpu
