// Compiles forward kernels for the emulator.
#pragma once

#include "forward/emulated_forward.hpp"
#include "kernels/sm90/forward.cuh"

namespace tandem::kernel_tests {

template <ForwardConfig... configs>
constexpr std::array<EmulatedForward, sizeof...(configs)> emulate() {
  return {EmulatedForward{configs, &tandem::forward<configs>}...};
}

}  // namespace tandem::kernel_tests
