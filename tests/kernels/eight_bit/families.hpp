// Compiles 8-bit forward kernels for the emulator.
#pragma once

#include <array>

#include "eight_bit/emulated_eight_bit.hpp"

// After it: the device language has names at file scope that it declares inside others.
#include "ops/eight_bit/sm90/eight_bit.cuh"

namespace tandem::kernel_tests {

/// With the largest logit of each row.
constexpr EightBitConfig with_maxima(EightBitConfig c) {
  c.tiling.max_logits = true;
  return c;
}

template <EightBitConfig config>
constexpr EmulatedEightBit emulated_eight_bit() {
  if constexpr (config.tiling.max_logits) {
    return {config, nullptr, &tandem::eight_bit_forward<config>};
  } else {
    return {config, &tandem::eight_bit_forward<config>};
  }
}

template <EightBitConfig... configs>
constexpr std::array<EmulatedEightBit, sizeof...(configs)> emulate_eight_bit() {
  return {emulated_eight_bit<configs>()...};
}

}  // namespace tandem::kernel_tests
