// Compiles 8-bit forward kernels for the emulator.
#pragma once

#include <array>

#include "eight_bit/emulated_eight_bit.hpp"

// After it: the device language has names at file scope that it declares inside others.
#include "ops/eight_bit/sm90/eight_bit.cuh"

namespace tandem::kernel_tests {

template <EightBitConfig... configs>
constexpr std::array<EmulatedEightBit, sizeof...(configs)> emulate_eight_bit() {
  return {EmulatedEightBit{configs, &tandem::eight_bit_forward<configs>}...};
}

}  // namespace tandem::kernel_tests
