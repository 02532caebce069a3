// Compiles backward kernels for the emulator.
#pragma once

#include <array>

#include "backward/emulated_backward.hpp"
#include "ops/backward/common/convert.cuh"
#include "ops/backward/common/preprocess.cuh"
#include "ops/backward/sm80/backward.cuh"
#include "ops/backward/sm90/backward.cuh"
#include "ops/functions/common/block_lists.cuh"

namespace tandem::kernel_tests {

/// As head dimension 256 is planned.
inline constexpr BackwardConfig cluster_of_two{
    .tiling = {.head_dim_qk = 256, .head_dim_v = 256, .block_n = 64},
    .cluster = 2,
    .dout_stages = 1,
    .dq_slices = 2};

/// Of a Config for gradients in f32 what its main kernel and the others read: each writes its own.
constexpr auto of_main(auto c) {
  c.f32_dq = false;
  return c;
}
constexpr auto of_rows(auto c) {
  c.f32_dk_dv = false;
  return c;
}

template <typename Config>
concept HasGradients = requires(Config config) {
  config.dout_stages;
};

template <HasGradients auto all>
constexpr EmulatedBackward emulated() {
  constexpr auto config = of_main(all);
  constexpr bool sm80 = config.family == Family::sm80;
  EmulatedBackward kernels{.config = all,
                           .preprocess = &tandem::backward_preprocess<of_rows(config)>,
                           .gated = &tandem::backward_gated_preprocess<of_rows(config)>,
                           .main = nullptr,
                           .convert = &tandem::backward_convert<of_rows(all)>,
                           .sink = &tandem::backward_sink<of_rows(config)>};
  if constexpr (config.functions.block_lists) kernels.lists = &tandem::list_query_blocks<config>;
  if constexpr (sm80 && config.functions.captured_gradients) {
    kernels.sm80_captured = &tandem::sm80_backward<config>;
  } else if constexpr (config.functions.captured_gradients) {
    kernels.captured = &tandem::backward<config>;
  } else if constexpr (sm80 && config.functions.given()) {
    kernels.sm80_functions = &tandem::sm80_backward<config>;
  } else if constexpr (sm80) {
    kernels.sm80 = &tandem::sm80_backward<config>;
  } else if constexpr (config.functions.given()) {
    kernels.functions = &tandem::backward<config>;
  } else {
    kernels.main = &tandem::backward<config>;
  }
  return kernels;
}

constexpr auto in_f32(auto c, bool dq, bool dk_dv) {
  c.f32_dq = dq;
  c.f32_dk_dv = dk_dv;
  return c;
}

template <HasGradients auto... configs>
constexpr std::array<EmulatedBackward, sizeof...(configs)> emulate() {
  return {emulated<configs>()...};
}

}  // namespace tandem::kernel_tests
