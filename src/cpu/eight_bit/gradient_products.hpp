// Products of numbers of 8 bits, in f32, and the rounding to e4m3. Sums of s8 stay below 2^24, so that they
// are exact in any order: 256 * 127 * 127 is.
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

/// c = a b or, if `adds`, c += a b, of quant_block rows; a[i][n] is a[i * row + n * depth_step].
TANDEM_WIDE_CLONES static void multiply(const float* a, std::int64_t row, std::int64_t depth_step,
                                        const float* b, std::int64_t columns, std::int64_t depth, bool adds,
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
      for (std::int64_t r = 0; r < rows; ++r) {
        float* const to = c + (i + r) * columns + j;
        if (adds) sums[r] += lanes_at(to);
        std::memcpy(to, &sums[r], sizeof sums[r]);
      }
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

/// To the nearest number in e4m3, ties to even, of up to its largest. NaN stays NaN.
[[gnu::always_inline]] inline void round_to_e4m3(ColumnLanes& x) {
  x = x > largest_e4m3 ? ColumnLanes{} + largest_e4m3 : x;
  x = x < -largest_e4m3 ? ColumnLanes{} - largest_e4m3 : x;
  WholeLanes power;
  std::memcpy(&power, &x, sizeof power);
  const WholeLanes exponent = WholeLanes{} + 0x7F800000U;
  const WholeLanes smallest = WholeLanes{} + 0x3C800000U;  // 2^-6, below which numbers are 2^-9 apart
  power &= exponent;
  power = power > smallest ? power : smallest;
  ColumnLanes magic;
  std::memcpy(&magic, &power, sizeof magic);
  magic *= 0x1.8p20F;  // added to x, all but three bits behind its first are gone
  x = (x + magic) - magic;
}

}  // namespace tandem::cpu
