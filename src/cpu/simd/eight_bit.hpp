// 8-bit values of f32 numbers, one at a time: plain code, the compiler's to vectorise. Sources that include
// it are compiled without contraction, so that values are the GPU's.
#pragma once

#include "cpu/simd/vec.hpp"
#include "problem/recipe.hpp"

namespace tandem::cpu::TANDEM_TARGET {

constexpr float limit_of(OperandType type) {
  return type == OperandType::s8 ? largest_s8 : largest_e4m3;
}

/// Below, a group is taken for zeros: the inverse of its scale might overflow. Scale and values are 0 then.
constexpr float smallest_largest = 0x1p-100F;

TANDEM_INLINE bool is_finite(float x) {
  return __builtin_fabsf(x) <= 3.4028235e38F;
}

TANDEM_INLINE float finite_magnitude(float x) {
  return is_finite(x) ? __builtin_fabsf(x) : 0.0F;
}

/// What the largest magnitude of some numbers is, of those that are finite, and whether all are.
struct Magnitudes {
  float largest = 0.0F;
  bool finite = true;
};

/// Magnitudes are in the order of their bits, and infinities and NaN behind all others.
static inline Magnitudes magnitudes_of(const float* x, std::int64_t count) {
  const auto magnitude = hn::Set(u32_lanes, 0x7FFFFFFFU);
  UVec bits[2] = {hn::Zero(u32_lanes), hn::Zero(u32_lanes)};
  std::int64_t i = 0;
  for (; i + 2 * vec_lanes <= count; i += 2 * vec_lanes) {
    for (int n = 0; n < 2; ++n) {
      bits[n] = hn::Max(bits[n], hn::And(f32_as_bits(load(x + i + n * vec_lanes)), magnitude));
    }
  }
  float largest[vec_lanes];
  store(bits_as_f32(hn::Max(bits[0], bits[1])), largest);
  Magnitudes m;
  for (const float of_lane : largest) {
    m.largest = of_lane > m.largest ? of_lane : m.largest;
    m.finite = m.finite && is_finite(of_lane);
  }
  for (; i < count; ++i) {
    m.largest = __builtin_fabsf(x[i]) > m.largest ? __builtin_fabsf(x[i]) : m.largest;
    m.finite = m.finite && is_finite(x[i]);
  }
  if (m.finite) return m;
  m.largest = 0.0F;
  for (i = 0; i < count; ++i) {
    m.largest = finite_magnitude(x[i]) > m.largest ? finite_magnitude(x[i]) : m.largest;
  }
  return m;
}

struct Scale {
  float scale;
  float inverse;
};
TANDEM_INLINE Scale scale_for(float largest, float limit) {
  if (largest < smallest_largest) return {0.0F, 0.0F};
  return {largest / limit, limit / largest};
}

/// s8 has no NaN: the scale says it for all of its group.
template <OperandType type>
TANDEM_INLINE float stored_scale(float scale, bool finite) {
  return type == OperandType::s8 && !finite ? __builtin_nanf("") : scale;
}

/// To nearest, ties to even, for |x| <= 2^22; NaN stays NaN. The compiler may not reorder it: no -ffast-math
/// here.
TANDEM_INLINE float round_even(float x) {
  return (x + 0x1.8p23F) - 0x1.8p23F;
}

TANDEM_INLINE float clamp(float x, float limit) {  // NaN stays NaN
  return x > limit ? limit : (x < -limit ? -limit : x);
}

/// The e4m3 code of |x| <= 448, or of NaN: to nearest, ties to even.
TANDEM_INLINE std::uint8_t e4m3_code(float x) {
  const float magnitude = __builtin_fabsf(x);
  std::uint32_t sign = 0;
  std::uint32_t bits = 0;
  std::uint32_t small = 0;
  const float aligned = magnitude + 0x1p14F;  // the last bit of 2^14 + m is 2^-9, the smallest code's value
  __builtin_memcpy(&sign, &x, sizeof sign);
  __builtin_memcpy(&bits, &magnitude, sizeof bits);
  __builtin_memcpy(&small, &aligned, sizeof small);
  const std::uint32_t normal = ((bits + 0x7FFFFU + ((bits >> 20) & 1U)) >> 20) - (120U << 3);
  std::uint32_t code = magnitude < 0x1p-6F ? small - (141U << 23) : normal;
  code = magnitude <= largest_e4m3 ? code : 0x7FU;
  return static_cast<std::uint8_t>(code | ((sign >> 24) & 0x80U));
}

TANDEM_INLINE std::uint8_t s8_code(float x) {
  const float whole = round_even(x);
  return static_cast<std::uint8_t>(static_cast<std::int8_t>(whole == whole ? static_cast<int>(whole) : 0));
}

/// The code of x, given x over its scale: to nearest even, saturated. An infinite x counts as NaN, so that it
/// does not pass for the largest code; s8 has no NaN, and 0 in its place.
template <OperandType type>
TANDEM_INLINE std::uint8_t eight_bit_of_quotient(float x, float quotient) {
  constexpr float limit = limit_of(type);
  const float inside = is_finite(x) ? clamp(quotient, limit) : __builtin_nanf("");
  return type == OperandType::s8 ? s8_code(inside) : e4m3_code(inside);
}

template <OperandType type>
TANDEM_INLINE std::uint8_t eight_bit_of(float x, float inverse) {
  return eight_bit_of_quotient<type>(x, x * inverse);
}

/// s8 codes of finite numbers.
TANDEM_INLINE void s8_codes_of(const float* x, int count, float inverse, std::uint8_t* out) {
  const hn::Rebind<std::uint8_t, Lanes> bytes;
  int c = 0;
  for (; c + vec_lanes <= count; c += vec_lanes) {
    const Vec quotient = hn::Mul(load(x + c), broadcast(inverse));
    const Vec inside = hn::Max(hn::Min(quotient, broadcast(largest_s8)), broadcast(-largest_s8));
    const Vec whole = hn::Add(inside, broadcast(0x1.8p23F));
    hn::StoreU(hn::TruncateTo(bytes, f32_as_bits(whole)), bytes, out + c);
  }
  for (; c < count; ++c) out[c] = eight_bit_of<OperandType::s8>(x[c], inverse);
}

}  // namespace tandem::cpu::TANDEM_TARGET
