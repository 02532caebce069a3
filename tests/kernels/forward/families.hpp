// Compiles forward kernels for the emulator.
#pragma once

#include "forward/emulated_forward.hpp"
#include "kernels/common/combine.cuh"
#include "kernels/sm90/decode.cuh"
#include "kernels/sm90/forward.cuh"

namespace tandem::kernel_tests {

template <ForwardConfig config>
constexpr auto combine_of() -> void (*)(ForwardParams) {
  if constexpr (config.schedule.split) return &tandem::combine<combine_config(config)>;
  return nullptr;
}

template <ForwardConfig config>
constexpr auto kernel_of() -> void (*)(ForwardParams) {
  if constexpr (config.by_warps()) {
    return &tandem::decode<config>;
  } else {
    return &tandem::forward<config>;
  }
}

template <ForwardConfig... configs>
constexpr std::array<EmulatedForward, sizeof...(configs)> emulate() {
  return {EmulatedForward{configs, kernel_of<configs>(), combine_of<configs>()}...};
}

}  // namespace tandem::kernel_tests
