// Compiles forward kernels of the family sm90 for the emulator.
#pragma once

#include "forward/emulated_combine.hpp"
#include "forward/emulated_forward.hpp"
#include "kernels/common/block_lists.cuh"
#include "kernels/sm90/decode.cuh"
#include "kernels/sm90/forward.cuh"
#include "kernels/sm90/forward_wide.cuh"

namespace tandem::kernel_tests {

template <ForwardConfig config>
constexpr EmulatedForward emulated() {
  if constexpr (config.functions.given()) {
    EmulatedForward kernel{config, nullptr, nullptr, nullptr, combine_of<config>()};
    if constexpr (config.functions.block_lists) kernel.lists = &tandem::list_blocks<config>;
    kernel.functions = &tandem::forward<config>;
    return kernel;
  } else if constexpr (config.converts()) {
    return {config, nullptr, &tandem::forward<config>, nullptr, combine_of<config>()};
  } else if constexpr (config.wide) {
    return {config, &tandem::forward_wide<config>, nullptr, nullptr, combine_of<config>()};
  } else if constexpr (config.by_warps()) {
    return {config, &tandem::decode<config>, nullptr, nullptr, combine_of<config>()};
  } else {
    return {config, &tandem::forward<config>, nullptr, nullptr, combine_of<config>()};
  }
}

template <ForwardConfig... configs>
constexpr std::array<EmulatedForward, sizeof...(configs)> emulate() {
  return {emulated<configs>()...};
}

}  // namespace tandem::kernel_tests
