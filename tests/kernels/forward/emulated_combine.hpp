// Compiles the kernels before and behind a forward kernel, of either family: that which lists key blocks, and
// that which merges parts.
#pragma once

#include "forward/emulated_forward.hpp"
#include "ops/functions/common/block_lists.cuh"
#include "ops/split/common/combine.cuh"

namespace tandem::kernel_tests {

template <auto config>
constexpr auto combine_of() -> decltype(EmulatedForward::combine) {
  if constexpr (has_combine<config>) {
    return []([[maybe_unused]] const Problem& p, const ForwardParams& params, const emulator::Grid& grid,
              const emulator::Options& options) {
      constexpr auto kernel = &tandem::combine<combine_config(config)>;
      if constexpr (config.tiling.gate) {
        emulator::launch(kernel, gpu::with_gate(p, params), grid, options);
      } else if constexpr (config.tiling.max_logits) {
        emulator::launch(kernel, gpu::with_maxima(p, params), grid, options);
      } else {
        emulator::launch(kernel, params, grid, options);
      }
    };
  }
  return nullptr;
}

template <auto config>
constexpr auto lists_of() -> decltype(EmulatedForward::lists) {
  if constexpr (config.functions.block_lists) {
    return [](const Problem& p, const ForwardParams& params, const FunctionParams* functions,
              const emulator::Grid& grid, const emulator::Options& options) {
      launch_forward<config>(&tandem::list_blocks<config>, p, params, functions, grid, options);
    };
  }
  return nullptr;
}

}  // namespace tandem::kernel_tests
