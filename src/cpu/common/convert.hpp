// 16-bit and 8-bit floating-point storage, and its conversion from and to f32, one number at a time. The only
// place that knows these formats by their bits in scalar code; src/cpu/simd/vec.hpp is the vector
// counterpart.
//
// Everything here is always inlined: sources compiled for one instruction set include it, and an out-of-line
// copy from one of them must never be the one that the linker keeps for all.
#pragma once

#include <bit>
#include <cstdint>

#include "tandem/tensor.hpp"

namespace tandem {

/// IEEE binary16, as stored.
struct f16 {
  std::uint16_t bits;
};
/// The upper half of a binary32, as stored.
struct bf16 {
  std::uint16_t bits;
};
/// OCP FP8 E4M3: bias 7, no infinity, NaN is S.1111.111, largest finite 448, as stored.
struct e4m3 {
  std::uint8_t bits;
};
/// An 8-bit integer, as stored.
struct s8 {
  std::int8_t value;
};

[[gnu::always_inline]] constexpr float to_f32(float x) {
  return x;
}

[[gnu::always_inline]] constexpr float to_f32(s8 x) {
  return static_cast<float>(x.value);
}

[[gnu::always_inline]] constexpr float to_f32(bf16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

[[gnu::always_inline]] constexpr float to_f32(f16 x) {
  const std::uint32_t sign = (x.bits & 0x8000U) << 16;
  const std::uint32_t magnitude = x.bits & 0x7FFFU;
  if (magnitude < 0x0400U) {  // zero and subnormals: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }
  const std::uint32_t rebias = magnitude >= 0x7C00U ? (255U - 31U) << 23 : (127U - 15U) << 23;
  return std::bit_cast<float>(sign | ((magnitude << 13) + rebias));
}

[[gnu::always_inline]] constexpr float to_f32(e4m3 x) {
  const std::uint32_t sign = (x.bits & 0x80U) << 24;
  const std::uint32_t magnitude = x.bits & 0x7FU;
  if (magnitude == 0x7FU) return std::bit_cast<float>(sign | 0x7FC00000U);
  if (magnitude < 8U) {  // zero and subnormals: a multiple of 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9F;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + ((127U - 7U) << 23)));
}

/// Rounds to nearest, ties to even; a NaN stays a (quiet) NaN; what overflows becomes infinite (e4m3: NaN).
template <typename T>
constexpr T from_f32(float x);

template <>
[[gnu::always_inline]] constexpr float from_f32<float>(float x) {
  return x;
}

template <>
[[gnu::always_inline]] constexpr bf16 from_f32<bf16>(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};
  return {static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16)};
}

/// Shared by f16 and e4m3: rounds |x| to `mantissa` bits with the given bias, subnormals included. The result
/// may be one past the largest finite code; the callers turn that into their infinity or NaN.
[[gnu::always_inline]] constexpr std::uint32_t narrow_magnitude(float x, int mantissa, int bias) {
  const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(x) & 0x7FFFFFFFU;
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  if (exponent < -bias - mantissa) return 0;  // below half of the smallest subnormal
  const std::uint32_t significand = (magnitude & 0x7FFFFFU) | 0x800000U;
  const int below = exponent < 1 - bias ? 1 - bias - exponent : 0;  // extra bits a subnormal loses
  const int shift = 23 - mantissa + below;
  const std::uint32_t kept = significand >> shift;
  const std::uint32_t rest = significand & ((1U << shift) - 1U);
  const std::uint32_t half = 1U << (shift - 1);
  const std::uint32_t up = rest > half || (rest == half && (kept & 1U) != 0) ? 1U : 0U;
  // A normal number's hidden bit adds one to the exponent field, hence bias - 1; rounding may carry into it.
  const std::uint32_t field = below > 0 ? 0U : static_cast<std::uint32_t>(exponent + bias - 1) << mantissa;
  return field + kept + up;
}

template <>
[[gnu::always_inline]] constexpr f16 from_f32<f16>(float x) {
  const std::uint32_t sign = (std::bit_cast<std::uint32_t>(x) >> 16) & 0x8000U;
  if (x != x) return {static_cast<std::uint16_t>(sign | 0x7E00U)};
  if (x >= 65520.0F || x <= -65520.0F) return {static_cast<std::uint16_t>(sign | 0x7C00U)};
  return {static_cast<std::uint16_t>(sign | narrow_magnitude(x, 10, 15))};
}

template <>
[[gnu::always_inline]] constexpr e4m3 from_f32<e4m3>(float x) {
  const std::uint32_t sign = (std::bit_cast<std::uint32_t>(x) >> 24) & 0x80U;
  if (x != x || x >= 464.0F || x <= -464.0F) return {static_cast<std::uint8_t>(sign | 0x7FU)};
  return {static_cast<std::uint8_t>(sign | narrow_magnitude(x, 3, 7))};
}

/// Element `i` of an array of floating-point `dtype`. Slow: for references and tests.
[[gnu::always_inline]] inline float load_as_f32(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::f32: return static_cast<const float*>(data)[i];
    case DType::f16: return to_f32(static_cast<const f16*>(data)[i]);
    case DType::bf16: return to_f32(static_cast<const bf16*>(data)[i]);
    case DType::e4m3: return to_f32(static_cast<const e4m3*>(data)[i]);
    default: return 0.0F;
  }
}

/// Rounds `value` into element `i` of an array of floating-point `dtype`. Slow: for references and tests.
[[gnu::always_inline]] inline void store_from_f32(void* data, DType dtype, std::int64_t i, float value) {
  switch (dtype) {
    case DType::f32: static_cast<float*>(data)[i] = value; break;
    case DType::f16: static_cast<f16*>(data)[i] = from_f32<f16>(value); break;
    case DType::bf16: static_cast<bf16*>(data)[i] = from_f32<bf16>(value); break;
    case DType::e4m3: static_cast<e4m3*>(data)[i] = from_f32<e4m3>(value); break;
    default: break;
  }
}

}  // namespace tandem
