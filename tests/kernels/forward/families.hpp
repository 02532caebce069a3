// Compiles forward kernels of the family sm90 for the emulator.
#pragma once

#include "forward/emulated_combine.hpp"
#include "forward/emulated_forward.hpp"
#include "forward/variants.hpp"
#include "ops/decode/sm90/decode.cuh"
#include "ops/forward/sm90/forward.cuh"
#include "ops/latent/sm90/forward_wide.cuh"

namespace tandem::kernel_tests {

/// The kernel that a Config of this family is for.
template <auto config>
constexpr auto kernel_for() {
  if constexpr (std::is_same_v<decltype(config), const DecodeConfig>) {
    return &tandem::decode<config>;
  } else if constexpr (std::is_same_v<decltype(config), const LatentConfig>) {
    return &tandem::forward_wide<config>;
  } else {
    return &tandem::forward<config>;
  }
}

template <auto config>
constexpr EmulatedForward emulated() {
  constexpr auto launch = [](const Problem& p, const ForwardParams& params, const FunctionParams* functions,
                             const emulator::Grid& grid, const emulator::Options& options) {
    launch_forward<config>(kernel_for<config>(), p, params, functions, grid, options);
  };
  return {config, launch, combine_of<config>(), lists_of<config>()};
}

template <typename Config>
concept LooksForKeys = requires(Config config) {
  config.keys;
};

template <LooksForKeys auto... configs>
constexpr std::array<EmulatedForward, sizeof...(configs)> emulate() {
  return {emulated<configs>()...};
}

}  // namespace tandem::kernel_tests
