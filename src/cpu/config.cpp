// How a Problem runs on this machine, and how much scratch memory that takes.
#include <omp.h>

#include "cpu/backward.hpp"
#include "cpu/cpu.hpp"
#include "cpu/forward_kernels.hpp"
#include "cpu/workspace.hpp"

namespace tandem::cpu {

Config choose(const Problem& problem, int threads) {
  Config config;
  config.target = best_target();
  config.threads = threads > 0 ? threads : omp_get_max_threads();
  if (problem.pass == Pass::backward) {
    const BackwardTiles tiles = backward_tiles(problem, config.target);
    config.block_q = tiles.block_q;
    config.block_k = tiles.block_k;
    return config;
  }
  const int stripe = forward_kernel(config.target).stripe;
  config.block_q = stripe;
  config.block_k = 128;
  return config;
}

std::size_t workspace_bytes(const Problem& problem, const Config& config) {
  return problem.pass == Pass::forward ? forward_workspace_bytes(problem, config)
                                       : backward_workspace_bytes(problem, config);
}

}  // namespace tandem::cpu
