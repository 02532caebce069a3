// The random-sign Hadamard rotation of a row of channels (incoherent processing), and back.
#pragma once

#include "cpu/simd/vec.hpp"
#include "problem/recipe.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// rotation_sign of every channel that a quantized head may have.
struct RotationSigns {
  alignas(64) float of[256];
};
constexpr RotationSigns rotation_signs = [] {
  RotationSigns signs{};
  for (int c = 0; c < 256; ++c) signs.of[c] = rotation_sign(c);
  return signs;
}();

/// 1 where the lane's number has no bit `half`, else -1.
template <int half>
struct HalfSigns {
  alignas(64) float of[vec_lanes];
  constexpr HalfSigns() : of{} {
    for (int i = 0; i < vec_lanes; ++i) of[i] = (i & half) == 0 ? 1.0F : -1.0F;
  }
};

/// Lane i ^ half in lane i.
template <int half, typename V>
TANDEM_INLINE V swap_lanes(V x) {
  if constexpr (half == 1) return hn::Shuffle2301(x);
  if constexpr (half == 2) return hn::Shuffle1032(x);
#if HWY_TARGET <= HWY_AVX3
  if constexpr (half == 4) return V{_mm512_shuffle_f32x4(x.raw, x.raw, 0xB1)};
#endif
  return hn::ConcatLowerUpper(f32_lanes, x, x);
}

/// The stages of a Hadamard matrix that add lanes of one register: a + b in the lower of two, a - b in the
/// upper. Products with 1 and -1 are exact, so that a fused sum is the plain one.
template <int half = 1>
TANDEM_INLINE Vec add_lanes(Vec x) {
  static constexpr HalfSigns<half> signs;
  const Vec added = hn::MulAdd(x, load(signs.of), swap_lanes<half>(x));
  if constexpr (2 * half < vec_lanes) return add_lanes<2 * half>(added);
  return added;
}

/// x becomes H (x * before) * after, of `registers` registers.
template <int registers>
TANDEM_INLINE void hadamard_registers(float* x, const float* before, float factor, const float* after) {
  Vec v[registers];
#pragma GCC unroll 16
  for (int r = 0; r < registers; ++r) {
    v[r] = load(x + r * vec_lanes);
    if (before != nullptr) v[r] = hn::Mul(v[r], load(before + r * vec_lanes));
    v[r] = add_lanes(v[r]);
  }
#pragma GCC unroll 4
  for (int half = 1; half < registers; half *= 2) {
#pragma GCC unroll 16
    for (int r = 0; r < registers; ++r) {
      if ((r & half) != 0) continue;
      const Vec a = v[r];
      const Vec b = v[r + half];
      v[r] = hn::Add(a, b);
      v[r + half] = hn::Sub(a, b);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < registers; ++r) {
    v[r] = hn::Mul(v[r], broadcast(factor));
    if (after != nullptr) v[r] = hn::Mul(v[r], load(after + r * vec_lanes));
    store(v[r], x + r * vec_lanes);
  }
}

/// x becomes H (x * before) / sqrt(size) * after, H the Hadamard matrix in Sylvester's order, size a power of
/// two. `before` and `after` are signs by channel, or null.
static inline void hadamard(float* x, int size, const float* before, const float* after) {
  const float factor = 1.0F / __builtin_sqrtf(static_cast<float>(size));
  switch (size % vec_lanes == 0 ? size / vec_lanes : 0) {
    case 1: return hadamard_registers<1>(x, before, factor, after);
    case 2: return hadamard_registers<2>(x, before, factor, after);
    case 4: return hadamard_registers<4>(x, before, factor, after);
    case 8: return hadamard_registers<8>(x, before, factor, after);
    case 16: return hadamard_registers<16>(x, before, factor, after);
    default: break;
  }
  for (int i = 0; before != nullptr && i < size; ++i) x[i] *= before[i];
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
  for (int i = 0; i < size; ++i) x[i] *= factor;
  for (int i = 0; after != nullptr && i < size; ++i) x[i] *= after[i];
}

/// Signs, then Hadamard blocks: an orthogonal map, so that products of rotated rows are those of the rows.
static inline void rotate(float* x, int dim) {
  for (int c = 0; c < dim; c += rotation_block(c, dim))
    hadamard(x + c, rotation_block(c, dim), rotation_signs.of + c, nullptr);
}

static inline void rotate_back(float* x, int dim) {
  for (int c = 0; c < dim; c += rotation_block(c, dim))
    hadamard(x + c, rotation_block(c, dim), nullptr, rotation_signs.of + c);
}

}  // namespace tandem::cpu::TANDEM_TARGET
