// Compiles backward kernels for the emulator.
#pragma once

#include <array>

#include "backward/emulated_backward.hpp"
#include "kernels/common/block_lists.cuh"
#include "kernels/common/convert.cuh"
#include "kernels/common/preprocess.cuh"
#include "kernels/sm80/backward.cuh"
#include "kernels/sm90/backward.cuh"

namespace tandem::kernel_tests {

/// As head dimension 256 is planned.
inline constexpr BackwardConfig cluster_of_two{
    .tiling = {.head_dim_qk = 256, .head_dim_v = 256, .block_n = 64, .cluster = 2},
    .dout_stages = 1,
    .dq_parts = 2};

/// Of equal lengths, by lists of query blocks.
constexpr BackwardConfig listed(BackwardConfig c, bool windowed) {
  c.mask = {.causal = windowed, .local = windowed};
  c.functions.block_lists = true;
  return c;
}

template <BackwardConfig config>
constexpr EmulatedBackward emulated() {
  EmulatedBackward kernels{.config = config,
                           .preprocess = &tandem::backward_preprocess<config>,
                           .main = nullptr,
                           .convert = &tandem::backward_convert<config>,
                           .sink = &tandem::backward_sink<config>};
  if constexpr (config.functions.block_lists) kernels.lists = &tandem::list_query_blocks<config>;
  if constexpr (config.of_sm80() && config.functions.given()) {
    kernels.sm80_functions = &tandem::sm80_backward<config>;
  } else if constexpr (config.of_sm80()) {
    kernels.sm80 = &tandem::sm80_backward<config>;
  } else if constexpr (config.functions.given()) {
    kernels.functions = &tandem::backward<config>;
  } else {
    kernels.main = &tandem::backward<config>;
  }
  return kernels;
}

template <BackwardConfig... configs>
constexpr std::array<EmulatedBackward, sizeof...(configs)> emulate() {
  return {emulated<configs>()...};
}

}  // namespace tandem::kernel_tests
