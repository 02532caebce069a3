// From a Problem and a Recipe to what the quantiser is launched with, and to where its codes and scales lie.
// Pure: needs no driver, so that the emulator's tests use it too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "api/problem.hpp"
#include "kernels/quantize_config.hpp"

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

/// Whether the units of K's mean are among the quantiser's; else the mean has a launch of its own.
bool finds_mean_on_the_way(const Problem& problem, const Recipe& recipe);

/// Bytes of K that the L2 is taken to keep, behind as much of V and half as much of its codes.
constexpr std::int64_t kept_bytes = std::int64_t{8} << 20;

/// `scratch` is 256-byte aligned memory of quantized_space. Where K's mean is found on the way, units go in
/// chunks of so many bytes of K.
QuantizeParams make_quantize_params(const Problem& problem, const Recipe& recipe, char* scratch,
                                    std::int64_t chunk_bytes = kept_bytes);

/// Those of a problem of codes, with its scales.
ArrangeParams make_arrange_params(const Problem& problem, const QuantizeParams& params);

}  // namespace tandem::gpu
