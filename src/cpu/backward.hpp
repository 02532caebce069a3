// The tiles of the backward pass on the CPU.
#pragma once

#include "api/problem.hpp"
#include "cpu/cpu.hpp"
#include "cpu/workspace.hpp"

namespace tandem::cpu {

/// Tiles of a backward Problem: they depend on dtype and head dimensions alone, so that the number of threads
/// and what else is in the batch change no bit of a result.
struct BackwardTiles {
  int block_q = 0;
  int block_k = 0;
};
BackwardTiles backward_tiles(const Problem& problem, Target target);

}  // namespace tandem::cpu
