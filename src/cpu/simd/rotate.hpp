// The random-sign Hadamard rotation of a row of channels (incoherent processing), and back.
#pragma once

#include "cpu/simd/vec.hpp"
#include "problem/recipe.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// x becomes H x / sqrt(size), H the Hadamard matrix in Sylvester's order, size a power of two.
TANDEM_INLINE void hadamard(float* x, int size) {
  for (int half = 1; half < size; half *= 2) {
    for (int first = 0; first < size; first += 2 * half) {
      for (int i = first; i < first + half; ++i) {
        const float a = x[i];
        const float b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
  const float factor = 1.0F / __builtin_sqrtf(static_cast<float>(size));
  for (int i = 0; i < size; ++i) x[i] *= factor;
}

TANDEM_INLINE void flip_signs(float* x, int dim) {
  for (int c = 0; c < dim; ++c) x[c] *= rotation_sign(c);
}

TANDEM_INLINE void hadamard_blocks(float* x, int dim) {
  for (int c = 0; c < dim; c += rotation_block(c, dim)) hadamard(x + c, rotation_block(c, dim));
}

/// Signs, then Hadamard blocks: an orthogonal map, so that products of rotated rows are those of the rows.
static inline void rotate(float* x, int dim) {
  flip_signs(x, dim);
  hadamard_blocks(x, dim);
}

static inline void rotate_back(float* x, int dim) {
  hadamard_blocks(x, dim);
  flip_signs(x, dim);
}

}  // namespace tandem::cpu::TANDEM_TARGET
