// The forward pass in 8 bits on a GPU: the quantiser's launches, then the 8-bit attention kernel.
#pragma once

#include <cstddef>

#include "kernels/config/eight_bit.hpp"
#include "kernels/config/quantize.hpp"
#include "problem/problem.hpp"

namespace tandem::gpu {

/// Scratch bytes of a call: codes and scales of q, k and v, and what their kernels work in.
std::size_t eight_bit_forward_workspace_bytes(const Problem& problem, const Recipe& recipe,
                                              const EightBitConfig& config);

/// The launches of a call: both, but for benches, which take them apart.
struct EightBitStages {
  bool quantize = true;
  bool attend = true;  ///< to what an earlier call left in the workspace
};

/// As forward (forward.hpp): launches on `stream` of the problem's device and returns; `workspace` may be
/// null. `quantize` specialises the kernels that make the codes.
void eight_bit_forward(const Problem& problem, const Recipe& recipe, const QuantizeConfig& quantize,
                       const EightBitConfig& config, void* stream, void* workspace,
                       EightBitStages stages = {});

}  // namespace tandem::gpu
