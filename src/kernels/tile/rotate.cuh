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

/// Multiplies rows of a warpgroup's 64 x dim accumulators by the Hadamard matrices of recipe.hpp over the
/// square root of their sizes, and by its signs: the inverse of signs first. Column 8 * j + 2 * lane + e: the
/// lowest bit and those from the third on are a register's, the two between are the quad's lanes.
template <int dim>
TANDEM_DEVICE void rotate_back(float (&o)[dim / 2], const FragmentPosition& position) {
  static_assert(dim % 32 == 0);
#pragma unroll
  for (int first = 0; first < dim; first += rotation_block(first, dim)) {
    const int size = rotation_block(first, dim);
    const float norm = inverse_root(size);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int bit = 1; bit < size; bit *= 2) {
#pragma unroll
        for (int at = first / 4; at < (first + size) / 4; ++at) {  // register pairs' e and j
          const int e = at % 2;
          const int j = at / 2;
          float& x = o[4 * j + 2 * h + e];
          if (bit == 2 || bit == 4) {
            const bool upper = (position.first_col & bit) != 0;
            const float other = ptx::shuffle_xor(x, bit / 2);
            x = upper ? other - x : other + x;
          } else if (bit == 1 ? e == 0 : (j & (bit / 8)) == 0) {
            float& y = bit == 1 ? o[4 * j + 2 * h + 1] : o[4 * (j + bit / 8) + 2 * h + e];
            const float sum = x + y;
            y = x - y;
            x = sum;
          }
        }
      }
#pragma unroll
      for (int j = first / 8; j < (first + size) / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool negative = (quad_signs(j, e) >> (position.first_col / 2) & 1) != 0;
          o[4 * j + 2 * h + e] *= negative ? -norm : norm;
        }
      }
    }
  }
}

}  // namespace tandem::tile
