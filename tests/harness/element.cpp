#include "element.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace tandem::harness {
namespace {

/// A small IEEE-like format: `mantissa` explicit bits, the smallest normal number 2^min_exponent.
struct Format {
  int mantissa;
  int min_exponent;
  int bias;
  double largest;
};
constexpr Format f16_format{.mantissa = 10, .min_exponent = -14, .bias = 15, .largest = 65504.0};
constexpr Format e4m3_format{.mantissa = 3, .min_exponent = -6, .bias = 7, .largest = 448.0};

double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52U);
}

/// The exponent of a finite value in the format: of those below its normal numbers, theirs.
int exponent_in(const Format& f, double value) {
  const auto biased = static_cast<int>(std::bit_cast<std::uint64_t>(value) >> 52U & 0x7FFU);
  return std::max(biased - 1023, f.min_exponent);
}

/// Rounds a finite value to the format's grid, ties to even (the default rounding mode of nearbyint).
double round_to_grid(const Format& f, double value) {
  if (value == 0.0) return value;
  const int digits = f.mantissa - exponent_in(f, value);
  return std::nearbyint(value * power_of_two(digits)) * power_of_two(-digits);
}

/// The code, without its sign, of a value >= 0 that lies on the format's grid.
std::uint32_t code_of(const Format& f, double value) {
  if (value == 0.0) return 0;
  const int exponent = exponent_in(f, value);
  const auto significand = static_cast<std::uint32_t>(value * power_of_two(f.mantissa - exponent));
  const std::uint32_t hidden = 1U << f.mantissa;
  if (significand < hidden) return significand;  // subnormal
  return (static_cast<std::uint32_t>(exponent + f.bias) << f.mantissa) + (significand - hidden);
}

double value_of(const Format& f, std::uint32_t code) {
  const std::uint32_t hidden = 1U << f.mantissa;
  const std::uint32_t exponent = code >> f.mantissa;
  const std::uint32_t fraction = code & (hidden - 1);
  if (exponent == 0) return fraction * power_of_two(f.min_exponent - f.mantissa);
  return (fraction + hidden) * power_of_two(static_cast<int>(exponent) - f.bias - f.mantissa);
}

double with_sign(double magnitude, bool negative) {
  return negative ? -magnitude : magnitude;
}

double f16_value(std::uint32_t code) {
  const std::uint32_t magnitude = code & 0x7FFFU;
  if (magnitude > 0x7C00U) return std::numeric_limits<double>::quiet_NaN();
  if (magnitude == 0x7C00U) return with_sign(std::numeric_limits<double>::infinity(), code > 0x7FFFU);
  return with_sign(value_of(f16_format, magnitude), code > 0x7FFFU);
}

std::uint16_t f16_code(double value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000U : 0U);
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7E00U);
  const double magnitude = std::isinf(value) ? value : round_to_grid(f16_format, value);
  if (std::abs(magnitude) > f16_format.largest) return static_cast<std::uint16_t>(sign | 0x7C00U);
  return static_cast<std::uint16_t>(sign | code_of(f16_format, std::abs(magnitude)));
}

std::uint16_t bf16_code(double value) {
  // f64 to f32 rounds once more than the definition; the tests feed it f32 values or fp64 sums where that is
  // harmless.
  const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

std::uint8_t e4m3_code(double value) {
  const auto sign = static_cast<std::uint8_t>(std::signbit(value) ? 0x80U : 0U);
  if (std::isnan(value)) return static_cast<std::uint8_t>(sign | 0x7FU);
  const double limited = std::min(std::abs(value), e4m3_format.largest);
  return static_cast<std::uint8_t>(sign | code_of(e4m3_format, round_to_grid(e4m3_format, limited)));
}

}  // namespace

double decode(DType dtype, const void* data, std::int64_t offset) {
  switch (dtype) {
    case DType::f32: return static_cast<const float*>(data)[offset];
    case DType::f16: {
      static const std::vector<double> values = [] {
        std::vector<double> all(1U << 16U);
        for (std::uint32_t code = 0; code < all.size(); ++code) all[code] = f16_value(code);
        return all;
      }();
      return values[static_cast<const std::uint16_t*>(data)[offset]];
    }
    case DType::bf16: {
      const std::uint32_t code = static_cast<const std::uint16_t*>(data)[offset];
      return std::bit_cast<float>(code << 16);
    }
    case DType::e4m3: {
      const std::uint32_t code = static_cast<const std::uint8_t*>(data)[offset];
      if ((code & 0x7FU) == 0x7FU) return std::numeric_limits<double>::quiet_NaN();
      return with_sign(value_of(e4m3_format, code & 0x7FU), code > 0x7FU);
    }
    case DType::i32: return static_cast<const std::int32_t*>(data)[offset];
    case DType::i64: return static_cast<double>(static_cast<const std::int64_t*>(data)[offset]);
    case DType::s8: return static_cast<const std::int8_t*>(data)[offset];
  }
  return std::numeric_limits<double>::quiet_NaN();
}

void decode(DType dtype, const void* data, std::int64_t offset, std::int64_t count, double* values) {
  if (dtype == DType::bf16) {
    const std::uint16_t* codes = static_cast<const std::uint16_t*>(data) + offset;
    for (std::int64_t n = 0; n < count; ++n) values[n] = std::bit_cast<float>(std::uint32_t{codes[n]} << 16);
    return;
  }
  for (std::int64_t n = 0; n < count; ++n) values[n] = decode(dtype, data, offset + n);
}

void encode(DType dtype, void* data, std::int64_t offset, double value) {
  switch (dtype) {
    case DType::f32: static_cast<float*>(data)[offset] = static_cast<float>(value); return;
    case DType::f16: static_cast<std::uint16_t*>(data)[offset] = f16_code(value); return;
    case DType::bf16: static_cast<std::uint16_t*>(data)[offset] = bf16_code(value); return;
    case DType::e4m3: static_cast<std::uint8_t*>(data)[offset] = e4m3_code(value); return;
    case DType::i32: static_cast<std::int32_t*>(data)[offset] = static_cast<std::int32_t>(value); return;
    case DType::i64: static_cast<std::int64_t*>(data)[offset] = static_cast<std::int64_t>(value); return;
    case DType::s8:  // which has no NaN: the value that shows most stands for it
      static_cast<std::int8_t*>(data)[offset] = static_cast<std::int8_t>(std::isnan(value) ? -128.0 : value);
      return;
  }
}

double rounded(DType dtype, double value) {
  alignas(8) unsigned char storage[8];
  encode(dtype, storage, 0, value);
  return decode(dtype, storage, 0);
}

}  // namespace tandem::harness
