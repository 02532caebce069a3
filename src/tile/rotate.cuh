// Undoes the rotation (signs and a Hadamard matrix) of V's channels on the rows of O, in registers.
#pragma once

#include "problem/recipe.hpp"
#include "tile/fragment.cuh"

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

/// log2 of the size of the Hadamard block that column c is in. Head dimensions are cut into powers of two,
/// the largest first, so it is the highest bit in which c and head_dim differ. Columns past the end count as
/// blocks of one. Head dimensions are multiples of 8, and so are the blocks.
TANDEM_DEVICE int rotation_exponent(int c, int head_dim) {
  return c < head_dim ? ptx::highest_bit(static_cast<u32>(c ^ head_dim)) : 0;
}

/// rotate_back for the rows of h. In column 8 * j + 2 * lane + e, the lowest bit (e) and those from the third
/// on (j) select a register; the two between select the quad's lane. `whole`: head_dim is dim, so that all
/// sizes are constants.
template <int dim, bool whole>
TANDEM_DEVICE void rotate_rows_back(float (&o)[dim / 2], const FragmentPosition& position, int head_dim,
                                    int h) {
  const auto exponent = [&](int j) { return rotation_exponent(8 * j, whole ? dim : head_dim); };
#pragma unroll
  for (int j = 0; j < dim / 8; ++j) {
    if (exponent(j) == 0) continue;
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
#pragma unroll
    for (int j = 0; j < dim / 8; ++j) {
      if ((j & bit) != 0 || j + bit >= dim / 8 || exponent(j) <= log + 3) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = o[4 * j + 2 * h + e];
        float& y = o[4 * (j + bit) + 2 * h + e];
        const float sum = x + y;
        y = x - y;
        x = sum;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < dim / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float norm =
          whole ? inverse_root(1 << exponent(j)) : ptx::exp2(-0.5F * static_cast<float>(exponent(j)));
      const bool negative = (quad_signs(j, e) >> (position.first_col / 2) & 1) != 0;
      o[4 * j + 2 * h + e] *= negative ? -norm : norm;
    }
  }
}

/// Multiplies the rows of a warpgroup's 64 x dim accumulators, of which `head_dim` columns count, by the
/// Hadamard matrices of recipe.hpp, divided by the square roots of their sizes, and then by its signs. That
/// is the inverse of the rotation, which applies the signs first.
template <int dim>
TANDEM_DEVICE void rotate_back(float (&o)[dim / 2], const FragmentPosition& position, int head_dim) {
  static_assert(dim % 32 == 0);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (head_dim == dim) {
      rotate_rows_back<dim, true>(o, position, head_dim, h);
    } else {
      rotate_rows_back<dim, false>(o, position, head_dim, h);
    }
  }
}

}  // namespace tandem::tile
