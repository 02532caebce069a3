// Compiles the kernel that merges the parts of a forward kernel, of either family.
#pragma once

#include "forward/emulated_forward.hpp"
#include "ops/split/common/combine.cuh"

namespace tandem::kernel_tests {

template <auto config>
constexpr auto combine_of() -> decltype(EmulatedForward::combine) {
  if constexpr (has_combine<config>) {
    return []([[maybe_unused]] const Problem& p, const ForwardParams& params, const emulator::Grid& grid,
              const emulator::Options& options) {
      constexpr auto kernel = &tandem::combine<combine_config(config)>;
      if constexpr (config.tiling.max_logits) {
        emulator::launch(kernel, gpu::with_maxima(p, params), grid, options);
      } else {
        emulator::launch(kernel, params, grid, options);
      }
    };
  }
  return nullptr;
}

}  // namespace tandem::kernel_tests
