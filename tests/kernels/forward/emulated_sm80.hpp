// Compiles forward kernels of the family sm80 for the emulator.
#pragma once

#include "forward/emulated_combine.hpp"
#include "ops/forward/sm80/forward.cuh"

namespace tandem::kernel_tests {

template <Sm80ForwardConfig config>
constexpr EmulatedForward emulated_sm80() {
  constexpr auto launch = [](const Problem& p, const ForwardParams& params, const FunctionParams* functions,
                             const emulator::Grid& grid, const emulator::Options& options) {
    launch_forward<config>(&sm80_forward<config>, p, params, functions, grid, options);
  };
  return {config, launch, combine_of<config>(), lists_of<config>()};
}

}  // namespace tandem::kernel_tests
