// Forward of 16-bit queries on 8-bit keys and values: these go to 16 bits in scratch memory, then the 16-bit
// kernel runs.
#pragma once

#include <cstddef>

#include "kernels/config/forward.hpp"
#include "kernels/config/quantize.hpp"
#include "problem/mixed.hpp"

namespace tandem::gpu {

/// Scratch bytes; `config` is that of the 16-bit forward.
std::size_t mixed_forward_workspace_bytes(const Problem& problem, const ForwardConfig& config);

/// Launches on the current device's primary context; `workspace` null allocates in stream order. `dequantize`
/// specialises the kernel before the 16-bit forward.
void mixed_forward(const Problem& problem, const QuantizeConfig& dequantize, const ForwardConfig& config,
                   void* stream, void* workspace);

}  // namespace tandem::gpu
