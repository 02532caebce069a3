// How a Problem runs on the CPU.
#pragma once

#include "cpu/targets/target.hpp"
#include "problem/recipe.hpp"

namespace tandem::cpu {

/// Printed by explain.
struct Config {
  Target target = Target::portable;
  int threads = 1;
  int block_q = 0;
  int block_k = 0;
  Recipe recipe;  ///< read if the problem's precision is not exact
};

}  // namespace tandem::cpu
