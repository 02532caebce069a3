// Compiles 8-bit forward kernels for the emulator.
#pragma once

#include <array>

#include "quantized/emulated_quantized.hpp"

// After it: the device language has names at file scope that it declares inside others.
#include "kernels/forward_quantized.cuh"

namespace tandem::kernel_tests {

template <QuantizedConfig... configs>
constexpr std::array<EmulatedQuantized, sizeof...(configs)> emulate_quantized() {
  return {EmulatedQuantized{configs, &tandem::forward_quantized<configs>}...};
}

}  // namespace tandem::kernel_tests
