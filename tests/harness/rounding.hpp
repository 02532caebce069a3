// Rounding f32 to 16 bits, millions of times.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "tandem/tensor.hpp"

namespace tandem::harness {

inline float round_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const float rounded = std::bit_cast<float>((bits + 0x7FFFU + ((bits >> 16) & 1U)) & 0xFFFF0000U);
  return std::isfinite(value) ? rounded : value;
}

inline float round_f16(float value) {
  if (!std::isfinite(value)) return value;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  // Below 2^-14 the unit is 2^-24: adding 0.75 * 2^0 puts the sum where fp32's unit is the same.
  const float magnitude = std::abs(value);
  if (magnitude < 0x1p-14F) return std::copysign((magnitude + 0.75F) - 0.75F, value);
  const float result = std::bit_cast<float>((bits + 0xFFFU + ((bits >> 13) & 1U)) & 0xFFFFE000U);
  return std::abs(result) > 65504.0F ? std::copysign(std::numeric_limits<float>::infinity(), value) : result;
}

/// `value` rounded to f32, f16 or bf16; fast, and equal to `rounded` of element.hpp.
inline float round_fast(DType dtype, float value) {
  return dtype == DType::bf16 ? round_bf16(value) : dtype == DType::f16 ? round_f16(value) : value;
}

}  // namespace tandem::harness
