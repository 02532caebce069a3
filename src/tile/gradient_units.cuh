// Powers of two that rows of queries and dO are divided by before they are rounded to e4m3 for dK and dV, one
// of each head of K and V.
#pragma once

#include "ops/eight_bit_backward/config.hpp"
#include "ptx/eight_bit.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace tandem::tile {

/// 2^exponent, of a normal number.
TANDEM_DEVICE float power_of_two(int exponent) {
  return ptx::float_of(static_cast<u32>(exponent + 127) << 23);
}

/// This much of the LSE's largest gradient is what the scale of dS, E, is at least.
constexpr float dlse_share = 0x1p-14F;

/// `head` counts the heads of K and V of all batch entries. The largest values have been found.
struct GradientUnits {
  const GradientMaxima& maxima;
  int head;

  /// The largest scale of V; 1 if that is 0.
  [[nodiscard]] TANDEM_DEVICE float v_scale() const {
    const float largest = largest_of(maxima.v);
    return largest > 0.0F ? largest : 1.0F;
  }
  [[nodiscard]] TANDEM_DEVICE int dout_exponent() const { return exponent(largest_of(maxima.dout)); }
  [[nodiscard]] TANDEM_DEVICE int q_exponent() const {
    const float of_dout = largest_of(maxima.q_dout) * (v_scale() * (1.0F / largest_s8));
    return exponent(ptx::fmax(of_dout, largest_of(maxima.q_dlse) * dlse_share));
  }

 private:
  [[nodiscard]] TANDEM_DEVICE float largest_of(const u32* largest) const {
    return ptx::float_of(ptx::load_global(largest + head));
  }
  /// That of the smallest power of two of which 448 are at least `largest`; 0 where it is 0 or no number.
  /// (448 is 1.75 * 2^8.)
  static TANDEM_DEVICE int exponent(float largest) {
    const u32 bits = ptx::bits_of(largest);
    if (bits == 0 || bits >= 0x7f800000U) return 0;
    return max(static_cast<int>((bits + 0x1fffff) >> 23) - 127 - 8, -126);
  }
};

}  // namespace tandem::tile
