// The backward pass on a GPU: preprocess, main kernel, conversion, one after the other on a stream.
#pragma once

#include <cstddef>

#include "kernels/config/backward.hpp"
#include "problem/problem.hpp"

namespace tandem::gpu {

/// Scratch bytes of a backward call, linear in the number of queries: what the kernels work in, and packed
/// copies of the tensors that TMA cannot read.
std::size_t backward_workspace_bytes(const Problem& problem, const BackwardConfig& config);

/// Launches on `stream` of the problem's device and returns; the context that was current stays so.
/// `workspace` (256-byte aligned device memory of backward_workspace_bytes, whatever it holds) may be null:
/// what is needed is then allocated and freed in stream order.
void backward(const Problem& problem, const BackwardConfig& config, void* stream, void* workspace);

}  // namespace tandem::gpu
