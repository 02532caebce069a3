// Products of whole numbers of up to 8 bits, in f32, and the rounding of P and dS to such numbers. Sums stay
// below 2^24, so that they are exact in any order and on any processor: 256 * 127 * 127 and 128 * 255 * 127
// are.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/common/vector_clones.hpp"
#include "problem/recipe.hpp"

namespace tandem::cpu {

/// Columns are computed so many at a time: rows of second operands and of results are whole ones.
constexpr std::int64_t gradient_columns = 16;
constexpr std::int64_t max_depth = 256;
constexpr std::int64_t whole_columns(std::int64_t count) {
  return (count + gradient_columns - 1) / gradient_columns * gradient_columns;
}

/// Columns of one row, which compilers do not vectorise of themselves where rows are unrolled, too.
using ColumnLanes = float __attribute__((vector_size(gradient_columns * sizeof(float))));
using WholeLanes = std::uint32_t __attribute__((vector_size(gradient_columns * sizeof(float))));

/// Lanes anywhere in memory, by reference, since how vectors are returned depends on the processor.
using LanesInMemory =
    float __attribute__((vector_size(gradient_columns * sizeof(float)), aligned(sizeof(float)), may_alias));
[[gnu::always_inline]] inline const LanesInMemory& lanes_at(const float* x) {
  return *reinterpret_cast<const LanesInMemory*>(x);
}

/// c = a b, of quant_block rows; a[i][n] is a[i * row + n * depth_step].
TANDEM_WIDE_CLONES static void multiply_whole(const float* a, std::int64_t row, std::int64_t depth_step,
                                              const float* b, std::int64_t columns, std::int64_t depth,
                                              float* c) {
  constexpr std::int64_t rows = 8;
  // Rows of b are whole powers of two apart, which the first-level cache holds few of: they are copied.
  ColumnLanes panel[max_depth];
  for (std::int64_t j = 0; j < columns; j += gradient_columns) {
    for (std::int64_t n = 0; n < depth; ++n) panel[n] = lanes_at(b + n * columns + j);
    for (std::int64_t i = 0; i < quant_block; i += rows) {
      const float* of_a = a + i * row;
      ColumnLanes sums[rows] = {};
      for (std::int64_t n = 0; n < depth; ++n, of_a += depth_step) {
        for (std::int64_t r = 0; r < rows; ++r) sums[r] += panel[n] * of_a[r * row];
      }
      for (std::int64_t r = 0; r < rows; ++r)
        std::memcpy(c + (i + r) * columns + j, &sums[r], sizeof sums[r]);
    }
  }
}

/// x becomes e^x, within 2^-22 of itself; 0 below -87. NaN stays NaN.
[[gnu::always_inline]] inline void exponentiate(ColumnLanes& x) {
  constexpr float magic = 0x1.8p23F;  // added, a whole number is in the last bits
  const ColumnLanes capped = x > 88.0F ? ColumnLanes{} + 88.0F : x;
  const ColumnLanes shifted = capped * 1.44269504F + magic;
  const ColumnLanes whole = shifted - magic;
  const ColumnLanes rest = (capped - whole * 0x1.62e4p-1F) - whole * 0x1.7f7d1cp-20F;  // ln 2 in two parts
  ColumnLanes sum = rest * (1.0F / 5040.0F) + 1.0F / 720.0F;
  sum = ((sum * rest + 1.0F / 120.0F) * rest + 1.0F / 24.0F) * rest + 1.0F / 6.0F;
  sum = ((sum * rest + 0.5F) * rest + 1.0F) * rest + 1.0F;
  WholeLanes power;
  std::memcpy(&power, &shifted, sizeof power);
  power = (power << 23) + 0x3F800000U;  // 2^whole
  ColumnLanes factor;
  std::memcpy(&factor, &power, sizeof factor);
  x = x < -87.0F ? ColumnLanes{} : sum * factor;
}

/// The scale of a group of numbers and its inverse: `largest` over `limit`, 0 of numbers below 2^-100, NaN
/// where one is no number.
struct GroupScale {
  float scale = 0.0F;
  float inverse = 0.0F;
};
inline GroupScale group_scale(float largest, bool finite, float limit) {
  if (!finite) return {.scale = std::numeric_limits<float>::quiet_NaN(), .inverse = 0.0F};
  if (largest < 0x1p-100F) return {};
  return {.scale = largest / limit, .inverse = limit / largest};
}

/// To nearest, ties to even, of |x| <= 255; 0 where x is no number.
[[gnu::always_inline]] inline float whole_number(float x) {
  const float shifted = (x + 0x1.8p23F) - 0x1.8p23F;
  return std::abs(x) <= 256.0F ? shifted : 0.0F;
}

/// Rounds quant_block numbers x * factor, and returns their scale. Zeros, which hidden pairs have, stay zeros
/// whatever their factor.
TANDEM_WIDE_CLONES static float round_line(const float* x, const float* factor, float limit, float* rounded) {
  constexpr int lanes = 16;
  float scaled[quant_block];
  float largest_of[lanes] = {};
  float sums[lanes] = {};  // 0, or NaN where a number is none
  for (int first = 0; first < quant_block; first += lanes) {
    for (int l = 0; l < lanes; ++l) {
      const float y = x[first + l] != 0.0F ? x[first + l] * factor[first + l] : 0.0F;
      const float magnitude = std::abs(y);
      scaled[first + l] = y;
      largest_of[l] = magnitude > largest_of[l] ? magnitude : largest_of[l];
      sums[l] += y * 0.0F;
    }
  }
  float largest = 0.0F;
  float sum = 0.0F;
  for (int l = 0; l < lanes; ++l) {
    largest = largest_of[l] > largest ? largest_of[l] : largest;
    sum += sums[l];
  }
  const GroupScale s = group_scale(largest, sum == 0.0F, limit);
  for (int i = 0; i < quant_block; ++i) rounded[i] = whole_number(scaled[i] * s.inverse);
  return s.scale;
}

}  // namespace tandem::cpu
