// How a Problem runs on the CPU.
#pragma once

#include "cpu/targets/target.hpp"
#include "problem/problem.hpp"
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

/// The Config for a Problem on this machine; threads 0 means OMP_NUM_THREADS or every core the process may
/// use.
Config choose(const Problem& problem, int threads);

/// Whether a matrix unit computes the products of a recipe: whole numbers, all of which are promoted block by
/// block.
bool takes_tiles(const Recipe& recipe, Target target);

/// How many threads a call has that wants so many; 0 means OMP_NUM_THREADS or every core the process may use.
/// No more than there are cores, or 16 where there are fewer.
/// 1 in the child of a process that had more: a child has only the thread that forked, and libgomp would wait
/// for the others for ever.
int usable_threads(int wanted);

}  // namespace tandem::cpu
