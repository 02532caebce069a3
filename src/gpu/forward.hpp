// The forward pass on a GPU: tensors that TMA cannot read are packed, the kernel of the Config is
// launched.
#pragma once

#include <cstddef>

#include "kernels/config/forward.hpp"
#include "problem/problem.hpp"

namespace tandem::gpu {

/// Scratch bytes of a forward call: room for packed copies of the tensors that TMA cannot read;
/// usually 0.
std::size_t forward_workspace_bytes(const Problem& problem, const ForwardConfig& config);

/// Loads the kernel that forward launches. Throws what would stop it.
void load_forward(int device, const ForwardConfig& config);

/// Launches on `stream` of the problem's device and returns; the context that was current stays so.
/// `workspace` (256-byte aligned device memory of forward_workspace_bytes) may be null: what is needed is
/// then allocated and freed in stream order.
void forward(const Problem& problem, const ForwardConfig& config, void* stream, void* workspace);

}  // namespace tandem::gpu
