// How raw products become logits, in every kernel but those of 8 bits.
#pragma once

#include "cpu/simd/math.hpp"
#include "problem/score_options.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// In a forward kernel a raw product s is softcapped if there is a softcap; a logit is s * scale, an
/// exponential 2^(s * factor) relative to the row's. Where a score function follows, or a mask function
/// follows a softcap, the kernel makes logits before the softmax (function.hpp): scale is 1 then, and cap_in
/// times s the score.
struct Logits {
  /// Goes into Q, so that the largest raw product is the largest logit: the sign of the scale, or 0. Where a
  /// score function follows, a scale that is a power of two goes there, too, which rounds nothing and spares
  /// a loop over the scores.
  float sign;
  float scale;    ///< not negative, and 1 where there is a softcap
  float factor;   ///< scale * log2(e)
  float cap_in;   ///< softcap: s becomes cap_out * tanh(s * cap_in)
  float cap_out;  ///< 0: no softcap

  /// Whether raw products go through `transform` before the softmax.
  [[nodiscard]] [[gnu::always_inline]] bool transforms() const { return cap_out != 0.0F; }
  [[nodiscard]] [[gnu::always_inline]] Vec transform(Vec s) const {
    return hn::Mul(tanh(hn::Mul(s, broadcast(cap_in))), broadcast(cap_out));
  }
  /// For scores that are transformed already.
  [[nodiscard]] [[gnu::always_inline]] Logits without_transform() const {
    return {sign, scale, factor, 0.0F, 0.0F};
  }
};

/// Whether a positive number is 2^n with n from -16 to 16, as head_dim^-0.5 is for head dimensions of 64 and
/// 256.
TANDEM_INLINE bool is_small_power_of_two(float x) {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  const int exponent = static_cast<int>(bits >> 23) - 127;
  return (bits & 0x7FFFFFU) == 0 && exponent >= -16 && exponent <= 16;
}

/// `score_function`: one follows.
TANDEM_INLINE Logits logits_of(const ScoreOptions& options, bool score_function) {
  const float sign = options.scale < 0.0F ? -1.0F : (options.scale == 0.0F ? 0.0F : 1.0F);
  const float scale = options.scale == 0.0F ? 1.0F : options.scale * sign;
  if (score_function && options.softcap == 0.0F) {
    if (is_small_power_of_two(scale)) return {sign * scale, 1.0F, log2_e, 1.0F, 0.0F};
    return {sign, 1.0F, log2_e, scale, 0.0F};
  }
  if (options.softcap != 0.0F) return {sign, 1.0F, log2_e, scale / options.softcap, options.softcap};
  return {sign, scale, scale * log2_e, 0.0F, 0.0F};
}

/// The logit of a raw product and its derivative, which the backward pass wants.
class SlopedLogits {
 public:
  [[gnu::always_inline]] explicit SlopedLogits(const ScoreOptions& options)
      : capped_(options.softcap > 0.0F),
        scale_(broadcast(options.scale)),
        cap_(broadcast(options.softcap)),
        inverse_cap_(broadcast(capped_ ? 1.0F / options.softcap : 0.0F)) {}

  /// Whether a logit is more than the product times the scale.
  [[nodiscard]] [[gnu::always_inline]] bool transforms() const { return capped_; }
  [[nodiscard]] [[gnu::always_inline]] Vec logit(Vec product) const {
    const Vec scaled = hn::Mul(product, scale_);
    return capped_ ? hn::Mul(tanh(hn::Mul(scaled, inverse_cap_)), cap_) : scaled;
  }
  /// The derivative by the product, from the logit.
  [[nodiscard]] [[gnu::always_inline]] Vec slope(Vec logit) const {
    return capped_ ? slope_of_bent(hn::Mul(logit, inverse_cap_)) : scale_;
  }
  /// Makes a raw product its logit and returns the slope. `transforms_`: transforms().
  template <bool transforms_>
  [[nodiscard]] [[gnu::always_inline]] Vec to_logit(Vec& product) const {
    product = hn::Mul(product, scale_);
    if constexpr (!transforms_) return scale_;
    const Vec bent = tanh(hn::Mul(product, inverse_cap_));
    product = hn::Mul(bent, cap_);
    return slope_of_bent(bent);
  }

 private:
  [[nodiscard]] [[gnu::always_inline]] Vec slope_of_bent(Vec bent) const {
    return hn::Mul(scale_, hn::NegMulAdd(bent, bent, broadcast(1.0F)));
  }

  bool capped_;
  Vec scale_, cap_, inverse_cap_;
};

}  // namespace tandem::cpu::TANDEM_TARGET
