// Head dimension 128: the paper's two ideas, each on and off, and a causal kernel.
#include "trace/emulated_names.hpp"

namespace tandem::cli::trace {

std::span<const EmulatedKernel> wide_kernels() {
  constexpr Tiling tiling{.block_m = 128, .block_n = 128};
  static constexpr auto kernels =
      emulate<ForwardConfig{.tiling = tiling},
              ForwardConfig{.tiling = tiling, .schedule = {.pingpong = false}},
              ForwardConfig{.tiling = tiling, .schedule = {.overlap = false}},
              ForwardConfig{.tiling = tiling, .schedule = {.overlap = false, .pingpong = false}},
              ForwardConfig{.tiling = tiling, .mask = {.causal = true}}>();
  return kernels;
}

}  // namespace tandem::cli::trace
