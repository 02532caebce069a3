// Runs the steps of a call on a GPU.
#pragma once

#include "gpu/steps.hpp"

namespace tandem::gpu {

/// Launches on `stream` of the problem's device and returns; the context that was current stays so.
/// `workspace` (256-byte aligned device memory of steps.workspace, whatever it holds) may be null: what is
/// needed is then allocated and freed in stream order. Every kernel is loaded before the first is launched,
/// so that an error leaves the outputs as they were.
void run(const Steps& steps, void* stream, void* workspace);

/// Launches the kernels of tandem::quantize; its workspace is allocated and freed in stream order. Throws
/// Error (unsupported) for f32, which has no kernel.
void run(const QuantizeSteps& steps, void* stream);

/// Launches the kernels of append_kv or merge, which take no workspace.
void run(const AppendSteps& steps, void* stream);
void run(const MergeSteps& steps, void* stream);

}  // namespace tandem::gpu
