// The tiles of the backward pass on the CPU.
#pragma once

#include "cpu/common/workspace.hpp"

namespace tandem::cpu {

/// Queries and keys of a tile, the same for every dtype, head dimension and instruction set: 256 x 192 is
/// within 2 % of the best of 128 to 384 x 96 to 288 at head dimensions 64, 128 and 256, in f32 and bf16.
constexpr int backward_block_q = 256;
constexpr int backward_block_k = 192;

}  // namespace tandem::cpu
