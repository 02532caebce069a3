// Undoing a rotation of V's channels on the rows of O, in registers.
#pragma once

#include "kernels/recipe.hpp"
#include "kernels/tile/fragment.cuh"

namespace tandem::tile {

/// 1 / sqrt(size), for powers of two.
TANDEM_DEVICE constexpr float inverse_root(int size) {
  float root = 1.0F;
  for (; size >= 4; size /= 4) root *= 0.5F;
  return size == 2 ? root * 0.70710678F : root;
}

/// The signs of columns 8 * j + 2 * lane + e of a quad's four lanes, one bit each.
TANDEM_DEVICE constexpr u32 quad_signs(int j, int e) {
  u32 bits = 0;
  for (int lane = 0; lane < 4; ++lane) {
    if (rotation_sign(8 * j + 2 * lane + e) < 0.0F) bits |= 1U << lane;
  }
  return bits;
}

/// One power of two of columns, from `first` on, of the rows of h.
template <int dim, int first>
TANDEM_DEVICE void rotate_back_block(float (&o)[dim / 2], const FragmentPosition& position, int h) {
  constexpr int size = rotation_block(first, dim);
  // Column 8 * j + 2 * lane + e: the lowest bit and those from the third on are a register's, the two between
  // are the quad's lanes.
#pragma unroll
  for (int j = first / 8; j < (first + size) / 8; ++j) {
    float& x = o[4 * j + 2 * h];
    float& y = o[4 * j + 2 * h + 1];
    const float sum = x + y;
    y = x - y;
    x = sum;
#pragma unroll
    for (int bit = 1; bit <= 2; ++bit) {
      const bool upper = (position.first_col & 2 * bit) != 0;
      const float other_x = ptx::shuffle_xor(x, bit);
      const float other_y = ptx::shuffle_xor(y, bit);
      x = upper ? other_x - x : other_x + x;
      y = upper ? other_y - y : other_y + y;
    }
  }
#pragma unroll
  for (int log = 0; log < 5; ++log) {  // 256 columns have 32 values of j
    const int bit = 1 << log;
    if (bit >= size / 8) continue;
#pragma unroll
    for (int j = 0; j < size / 8; ++j) {
      if ((j & bit) != 0) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = o[4 * (first / 8 + j) + 2 * h + e];
        float& y = o[4 * (first / 8 + j + bit) + 2 * h + e];
        const float sum = x + y;
        y = x - y;
        x = sum;
      }
    }
  }
  constexpr float norm = inverse_root(size);
#pragma unroll
  for (int j = first / 8; j < (first + size) / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool negative = (quad_signs(j, e) >> (position.first_col / 2) & 1) != 0;
      o[4 * j + 2 * h + e] *= negative ? -norm : norm;
    }
  }
  if constexpr (first + size < dim) rotate_back_block<dim, first + size>(o, position, h);
}

/// Multiplies rows of a warpgroup's 64 x dim accumulators by the Hadamard matrices of recipe.hpp over the
/// square root of their sizes, and by its signs: the inverse of signs first.
template <int dim>
TANDEM_DEVICE void rotate_back(float (&o)[dim / 2], const FragmentPosition& position) {
  static_assert(dim % 32 == 0);
#pragma unroll
  for (int h = 0; h < 2; ++h) rotate_back_block<dim, 0>(o, position, h);
}

}  // namespace tandem::tile
