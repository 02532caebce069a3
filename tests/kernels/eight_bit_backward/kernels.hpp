// Compiles the kernels of the 8-bit backward pass for the emulator.
#pragma once

#include <array>

#include "eight_bit_backward/emulated_eight_bit_backward.hpp"

// After it: the device language has names at file scope that it declares inside others.
#include "ops/eight_bit_backward/common/eight_bit_convert.cuh"
#include "ops/eight_bit_backward/common/quantize_keys.cuh"
#include "ops/eight_bit_backward/common/quantize_queries.cuh"
#include "ops/eight_bit_backward/sm90/eight_bit_backward.cuh"
#include "ops/quantize/common/mean_of_keys.cuh"

namespace tandem::kernel_tests {

constexpr QuantizeConfig quantizer_of(const EightBitBackwardConfig& c, bool vectors) {
  return {.element = c.tiling.element,
          .head_dim_qk = c.tiling.head_dim_qk,
          .head_dim_v = c.tiling.head_dim_v,
          .qk = OperandType::s8,
          .pv = OperandType::s8,
          .rotate_v = true,
          .varlen = c.mask.varlen,
          .vectors = vectors};
}

template <EightBitBackwardConfig config>
constexpr EmulatedEightBitBackward emulated() {
  // The loads by element serve all layouts; one family has those by vectors.
  constexpr QuantizeConfig quantizer = quantizer_of(config, config.schedule.staggered);
  return {.config = config,
          .quantizer = quantizer,
          .mean = &mean_of_keys<mean_config(quantizer)>,
          .keys = &quantize_keys<quantizer>,
          .queries = &quantize_queries<quantizer>,
          .main = &eight_bit_backward<config>,
          .convert = &eight_bit_convert<config>};
}

/// Of heads of 64 dimensions.
constexpr EightBitBackwardConfig narrow(EightBitBackwardConfig c) {
  c.tiling.head_dim_qk = c.tiling.head_dim_v = 64;
  c.tiling.block_m = gradient_queries(64);
  return c;
}

constexpr EightBitBackwardConfig staggered(EightBitBackwardConfig c) {
  c.schedule.staggered = true;
  return c;
}

template <EightBitBackwardConfig... configs>
constexpr std::array<EmulatedEightBitBackward, sizeof...(configs)> emulate() {
  return {emulated<configs>()...};
}

}  // namespace tandem::kernel_tests
