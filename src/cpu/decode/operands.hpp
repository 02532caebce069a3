// What the products of a short query multiply: numbers widened to f32, split into two halves, or in pairs.
#pragma once

#include "cpu/simd/dot.hpp"
#include "cpu/simd/transpose.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// Products of f32 numbers, which k is widened to.
template <typename K>
struct WideScores {
  using Query = float;
  using Operand = Vec;
  static constexpr int columns = vec_lanes;
  [[gnu::always_inline]] static Operand query(const Query* p) { return load(p); }
  [[gnu::always_inline]] static Operand key(const K* p) { return load(p); }
  [[gnu::always_inline]] static Vec multiply_add(Operand a, Operand b, Vec sum) {
    return hn::MulAdd(a, b, sum);
  }
};

#if HWY_TARGET <= HWY_AVX3
/// 32 bf16 as f32, those at even places and those at odd ones: two instructions, where widening them in order
/// takes four.
struct Split {
  Vec even;
  Vec odd;
};
TANDEM_INLINE Split split(const bf16* p) {
  const UVec both = hn::LoadU(u32_lanes, reinterpret_cast<const std::uint32_t*>(p));
  return {bits_as_f32(hn::ShiftLeft<16>(both)), bits_as_f32(hn::And(both, hn::Set(u32_lanes, 0xFFFF0000U)))};
}

/// The first 16 of the numbers that `s` has, in order, or with half = 1 the last 16.
TANDEM_INLINE Vec in_order(const Split& s, int half) {
  const __m512i lower = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i order = _mm512_add_epi32(lower, _mm512_set1_epi32(8 * half));
  return Vec{_mm512_permutex2var_ps(s.even.raw, order, s.odd.raw)};
}

/// Products in f32 of bf16 that is split; q is split likewise, 32 columns at a time.
struct SplitScores {
  using Query = float;
  using Operand = Split;
  static constexpr int columns = 2 * vec_lanes;
  [[gnu::always_inline]] static Operand query(const Query* p) { return {load(p), load(p + vec_lanes)}; }
  [[gnu::always_inline]] static Operand key(const bf16* p) { return split(p); }
  [[gnu::always_inline]] static Vec multiply_add(Operand a, Operand b, Vec sum) {
    return hn::MulAdd(a.odd, b.odd, hn::MulAdd(a.even, b.even, sum));
  }
  /// Columns in order -> as query() takes them; `count` is a multiple of `columns`.
  static void arrange(Query* q, int count) {
    for (int c = 0; c < count; c += columns) {
      Query even[vec_lanes];
      for (int i = 0; i < vec_lanes; ++i) {
        even[i] = q[c + 2 * i];
        q[c + i] = q[c + 2 * i + 1];
      }
      for (int i = 0; i < vec_lanes; ++i) {
        q[c + vec_lanes + i] = q[c + i];
        q[c + i] = even[i];
      }
    }
  }
};
#endif

#if defined(__AVX512BF16__)
/// Products of pairs of bf16: k is bf16, or 8-bit values, all of which bf16 has.
template <typename K>
struct PairScores {
  using Query = bf16;
  using Operand = UVec;
  static constexpr int columns = 2 * vec_lanes;
  [[gnu::always_inline]] static Operand query(const Query* p) { return bf16_of(p); }
  [[gnu::always_inline]] static Operand key(const K* p) { return bf16_of(p); }
  [[gnu::always_inline]] static Vec multiply_add(Operand a, Operand b, Vec sum) {
    return dot_bf16(sum, a, b);
  }
};
#endif

/// Columns of a row of q: whole registers, the last of them filled with zeros.
template <typename Scores>
constexpr int query_stride(int columns) {
  return (columns + Scores::columns - 1) / Scores::columns * Scores::columns;
}

/// The sums of the lanes of a, b, c and d, in this order, in memory.
TANDEM_INLINE void store_sums(Vec a, Vec b, Vec c, Vec d, float* sums) {
  transpose_blocks(a, b, c, d);
  const Vec by_block = hn::Add(hn::Add(a, b), hn::Add(c, d));  // the sums of each 128 bits
#if HWY_TARGET <= HWY_AVX3
  const __m256 half =
      _mm256_add_ps(_mm512_castps512_ps256(by_block.raw), _mm512_extractf32x8_ps(by_block.raw, 1));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif HWY_TARGET == HWY_AVX2
  _mm_storeu_ps(sums,
                _mm_add_ps(_mm256_castps256_ps128(by_block.raw), _mm256_extractf128_ps(by_block.raw, 1)));
#else
  hn::StoreU(by_block, f32_lanes, sums);
#endif
}

}  // namespace tandem::cpu::TANDEM_TARGET
