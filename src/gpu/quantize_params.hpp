// From a Problem and a Recipe to what the quantiser is launched with, and to where its codes and scales lie.
// Pure: needs no driver, so that the emulator's tests use it too.
#pragma once

#include <cstddef>

#include "kernels/config/quantize.hpp"
#include "problem/problem.hpp"

namespace tandem::gpu {

/// Scratch memory of a quantised call, as offsets in bytes, each a multiple of 256. What a recipe does
/// without takes no room.
struct QuantizedSpace {
  std::size_t q_codes = 0;
  std::size_t k_codes = 0;
  std::size_t v_codes = 0;
  std::size_t q_scales = 0;
  std::size_t k_scales = 0;
  std::size_t v_scales = 0;
  std::size_t shift = 0;
  std::size_t mean = 0;
  std::size_t sums = 0;
  std::size_t counters = 0;  ///< to be 0 before the launches: that of the attention kernel's tiles, then
  std::size_t arrived = 0;   ///< those of K's sums
  std::size_t counter_bytes = 0;
  std::size_t bytes = 0;
};
QuantizedSpace quantized_space(const Problem& problem, const Recipe& recipe);

/// `scratch` is 256-byte aligned memory of quantized_space.
QuantizeParams make_quantize_params(const Problem& problem, const Recipe& recipe, char* scratch);

/// Those of a problem of codes, with its scales.
ArrangeParams make_arrange_params(const Problem& problem, const QuantizeParams& params);

/// What `dequantize` is launched with to fill the 16-bit K and V of dequantized(problem, memory).
ArrangeParams make_dequantize_params(const Problem& problem, const Problem& dequantized);

}  // namespace tandem::gpu
