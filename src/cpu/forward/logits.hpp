// How a forward kernel's raw products become logits.
#pragma once

#include "cpu/forward/tile.hpp"
#include "cpu/simd/math.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// A raw product s is softcapped if there is a softcap; a logit is s * scale, an exponential 2^(s * factor)
/// relative to the row's. Where a score function follows, or a mask function follows a softcap, the kernel
/// makes logits before the softmax (function.hpp): scale is 1 then, and cap_in times s the score.
struct Logits {
  /// Goes into Q, so that the largest raw product is the largest logit: the sign of the scale, or 0. Where a
  /// score function follows, a scale that is a power of two goes there, too, which rounds nothing and spares
  /// a loop over the scores.
  float sign;
  float scale;    ///< not negative, and 1 where there is a softcap
  float factor;   ///< scale * log2(e)
  float cap_in;   ///< softcap: s becomes cap_out * tanh(s * cap_in)
  float cap_out;  ///< 0: no softcap
};

/// Whether a positive number is 2^n with n from -16 to 16, as head_dim^-0.5 is for head dimensions of 64 and
/// 256.
TANDEM_INLINE bool is_small_power_of_two(float x) {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  const int exponent = static_cast<int>(bits >> 23) - 127;
  return (bits & 0x7FFFFFU) == 0 && exponent >= -16 && exponent <= 16;
}

TANDEM_INLINE Logits logits_of(const ForwardTile& t) {
  const float sign = t.scale < 0.0F ? -1.0F : (t.scale == 0.0F ? 0.0F : 1.0F);
  const float scale = t.scale == 0.0F ? 1.0F : t.scale * sign;
  if (t.functions != nullptr && t.functions->score != nullptr && t.softcap == 0.0F) {
    if (is_small_power_of_two(scale)) return {sign * scale, 1.0F, log2_e, 1.0F, 0.0F};
    return {sign, 1.0F, log2_e, scale, 0.0F};
  }
  if (t.softcap != 0.0F) return {sign, 1.0F, log2_e, scale / t.softcap, t.softcap};
  return {sign, scale, scale * log2_e, 0.0F, 0.0F};
}

}  // namespace tandem::cpu::TANDEM_TARGET
