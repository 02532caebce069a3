// The rotation of rows, each of which two or four threads share: signs, then a Hadamard matrix.
//
// The first levels of the matrix are between neighbours of one thread, one or two are between threads, and
// the others again between values of one thread: 1 or 2 shuffles a value whatever the head dimension. The
// levels come in the CPU's order, so that results equal the CPU's bit by bit.
#pragma once

#include "ops/quantize/common/quantize_rows.cuh"

namespace tandem::quantizer {

/// The rotation's factor for a block of `size` channels, as the CPU computes it: 1 / sqrt(size), where sqrt
/// is rounded.
constexpr float rotation_factor(int size) {
  float factor = 1.0F;
  for (; size >= 4; size /= 4) factor *= 0.5F;
  return size == 2 ? factor * (1.0F / 1.41421356237309504880F) : factor;
}

TANDEM_DEVICE void butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

/// The levels of neighbours, a power of two.
template <int count>
TANDEM_DEVICE void butterflies(float (&x)[count]) {
#pragma unroll
  for (int half = 1; half < count; half *= 2) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if ((i & half) == 0) butterfly(x[i], x[i + half]);
    }
  }
}

/// A level between threads. The lower thread keeps the sum and passes side = 1, the upper one -1.
TANDEM_DEVICE float butterfly_across(float x, int distance, float side) {
  return ptx::fma(x, side, ptx::shuffle_xor(x, distance));
}

/// Whether channels `c` and `other`, the larger one, are in one block of the rotation.
constexpr bool in_one_block(int c, int other, int head_dim) {
  int begin = 0;
  while (begin + rotation_block(begin, head_dim) <= c) begin += rotation_block(begin, head_dim);
  return other < begin + rotation_block(begin, head_dim);
}

/// The levels between eight of the last `rest` channels of a row, from `col` of them on, which is a multiple
/// of 8.
template <int rest>
TANDEM_DEVICE void butterflies_of_rest(float (&x)[8], int col) {
#pragma unroll
  for (int half = 1; half < 8; half *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & half) != 0) continue;
      const int c = rest / 8 * 8 + i;
      const bool pair = col + 8 <= rest || (rest % 8 != 0 && col < rest && in_one_block(c, c + half, rest));
      if (pair) butterfly(x[i], x[i + half]);
    }
  }
}

/// The factors of the same eight, of which a block of 16 may be the first.
template <int rest>
TANDEM_DEVICE void scale_rest(float (&x)[8], int col) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float factor = rotation_factor(8);
    if (rest >= 16 && col < 16) {
      factor = rotation_factor(16);
    } else if (col + 8 > rest) {
      factor = 1.0F;
      const int c = rest / 8 * 8 + i;  // blocks of 4, 2 and 1
      if (c < rest) {
        int begin = 0;
        while (begin + rotation_block(begin, rest) <= c) begin += rotation_block(begin, rest);
        factor = rotation_factor(rotation_block(begin, rest));
      }
    }
    x[i] *= factor;
  }
}

/// The last vectors of a row whose head dimension is not a multiple of 32: blocks of at most 16 channels.
template <int head_dim, int threads>
TANDEM_DEVICE void rotate_rest(Row<head_dim, threads>& row, int t) {
  constexpr int rest = head_dim % 32;
  constexpr int first = Row<head_dim, threads>::whole;
  butterflies_of_rest<rest>(row.x[first], t * row.unit);
  if constexpr (threads == 2) {
    butterflies_of_rest<rest>(row.x[first + 1], t * row.unit + 8);
    if (rest >= 16 && t == 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) butterfly(row.x[first][i], row.x[first + 1][i]);
    }
    scale_rest<rest>(row.x[first + 1], t * row.unit + 8);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float across = butterfly_across(row.x[first][i], 1, (t & 1) != 0 ? -1.0F : 1.0F);
      if (rest >= 16 && t < 2) row.x[first][i] = across;
    }
  }
  scale_rest<rest>(row.x[first], t * row.unit);
}

/// The levels between groups of 32 channels, and the factor. A block of the rotation has a power of two of
/// such groups, the largest block first: the bits of the number of groups.
template <int groups = 8, int head_dim, int threads>
TANDEM_DEVICE void rotate_groups(Row<head_dim, threads>& row) {
  constexpr int all = head_dim / 32;
  if constexpr ((all & groups) != 0) {
    constexpr int of_group = Row<head_dim, threads>::unit / 8;  // vectors
    constexpr int first = all / (2 * groups) * (2 * groups) * of_group;
    constexpr int vectors = groups * of_group;
#pragma unroll
    for (int half = of_group; half < vectors; half *= 2) {
#pragma unroll
      for (int j = 0; j < vectors; ++j) {
        if ((j & half) != 0) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) butterfly(row.x[first + j][i], row.x[first + j + half][i]);
      }
    }
    constexpr float factor = rotation_factor(32 * groups);
#pragma unroll
    for (int j = 0; j < vectors; ++j) {
#pragma unroll
      for (int i = 0; i < 8; ++i) row.x[first + j][i] *= factor;
    }
  }
  if constexpr (groups > 1) rotate_groups<groups / 2>(row);
}

/// Which of a thread's channels the rotation negates: bit k of word w is for value k of its vectors from 4 w
/// on.
template <int head_dim, int threads>
struct SignBits {
  u32 words[(Row<head_dim, threads>::vectors + 3) / 4][threads];

  constexpr SignBits() : words{} {
    for (int i = 0; i < Row<head_dim, threads>::vectors * threads * 8; ++i) {
      const int vector = i / 8 / threads, t = i / 8 % threads;
      const int c = Row<head_dim, threads>::channel(vector, t) + i % 8;
      const u32 bit = 1U << (vector % 4 * 8 + i % 8);
      if (c < head_dim && rotation_sign(c) < 0.0F) words[vector / 4][t] |= bit;
    }
  }
};

/// Negates what the rotation negates: constants, of which a selection or three find the thread's.
template <int head_dim, int threads>
TANDEM_DEVICE void apply_signs(Row<head_dim, threads>& row, int t) {
  constexpr SignBits<head_dim, threads> signs;
#pragma unroll
  for (int j = 0; j < row.vectors; ++j) {
    const u32(&of)[threads] = signs.words[j / 4];
    u32 bits = (t & 1) != 0 ? of[1] : of[0];
    if constexpr (threads == 4) {
      const u32 high = (t & 1) != 0 ? of[3] : of[2];
      if ((t & 2) != 0) bits = high;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 sign = bits << (31 - j % 4 * 8 - i) & 0x80000000U;
      row.x[j][i] = ptx::float_of(ptx::bits_of(row.x[j][i]) ^ sign);
    }
  }
}

/// Multiplies by Hadamard blocks, divided by the square roots of their sizes.
template <int head_dim, int threads>
TANDEM_DEVICE void multiply_by_hadamard(Row<head_dim, threads>& row, int t) {
#pragma unroll
  for (int j = 0; j < row.whole; ++j) butterflies(row.x[j]);
  if constexpr (threads == 2) {
#pragma unroll
    for (int j = 0; j < row.whole; j += 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) butterfly(row.x[j][i], row.x[j + 1][i]);
    }
  }
#pragma unroll
  for (int j = 0; j < row.whole; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      row.x[j][i] = butterfly_across(row.x[j][i], 1, (t & 1) != 0 ? -1.0F : 1.0F);
      if constexpr (threads == 4) {
        row.x[j][i] = butterfly_across(row.x[j][i], 2, (t & 2) != 0 ? -1.0F : 1.0F);
      }
    }
  }
  rotate_groups(row);
  if constexpr (head_dim % 32 != 0) rotate_rest(row, t);
}

template <int head_dim, int threads>
TANDEM_DEVICE void rotate(Row<head_dim, threads>& row, int t) {
  apply_signs(row, t);
  multiply_by_hadamard(row, t);
}

}  // namespace tandem::quantizer
