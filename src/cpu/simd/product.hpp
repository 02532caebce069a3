// The register tile that both products of attention are made of:
//
//   acc[row][lane] += sum over depth of  broadcast(row, depth) * lanes[depth][lane]
//
// The lane operand is packed (Q^T, P^T); the broadcast operand is read where the user has it. S^T = K Q^T
// broadcasts K with row = key and depth = dim; O^T = V^T P^T broadcasts V with row = dim and depth = key.
#pragma once

#include "cpu/simd/dot.hpp"
#include "cpu/simd/vec.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// f32 arithmetic: a word is one element. Segments of a block of keys are whole chunks of key_chunk keys.
struct F32Math {
  using Word = float;
  static constexpr int elements_per_word = 1;
  static constexpr int key_chunk = vec_lanes;
  using Operand = Vec;
  TANDEM_INLINE Operand load_lanes(const Word* p) { return hn::LoadU(f32_lanes, p); }
  TANDEM_INLINE Operand splat(const Word* p) { return hn::Set(f32_lanes, *p); }
  TANDEM_INLINE Vec multiply_add(Operand a, Operand b, Vec acc) { return hn::MulAdd(a, b, acc); }
};

#if defined(__AVX512BF16__)
/// bf16 dot products: a word is two elements that are consecutive along the depth, the first in the lower
/// half.
struct Bf16Math {
  using Word = std::uint32_t;
  static constexpr int elements_per_word = 2;
  static constexpr int key_chunk = vec_lanes;
  using Operand = UVec;
  TANDEM_INLINE Operand load_lanes(const Word* p) { return hn::LoadU(u32_lanes, p); }
  TANDEM_INLINE Operand splat(const Word* p) {
    Word word;  // two bf16 are only 16-bit aligned
    __builtin_memcpy(&word, p, sizeof word);
    return hn::Set(u32_lanes, word);
  }
  TANDEM_INLINE Vec multiply_add(Operand a, Operand b, Vec acc) { return dot_bf16(acc, a, b); }
};
#endif

#if defined(TANDEM_MATRIX_UNIT)
/// bf16 on the matrix unit, which takes the words of Bf16Math, 16 at a time along the depth. Its products are
/// in forward/tile_products.hpp.
struct TileMath {
  using Word = std::uint32_t;
  static constexpr int elements_per_word = 2;
  static constexpr int key_chunk = 32;
};
using PairMath = TileMath;
template <typename Math>
constexpr bool on_tiles = __is_same(Math, TileMath);
#else
#if defined(__AVX512BF16__)
using PairMath = Bf16Math;
#endif
template <typename Math>
constexpr bool on_tiles = false;
#endif

/// Runs `depth` words of a tile of rows x (vecs registers of lanes), with all accumulators in registers.
/// Word (row, t) of the broadcast operand is at row * row_stride + t * depth_stride; `lane_stride` words lie
/// between two depths of the lane operand.
template <typename Math, int rows, int vecs>
TANDEM_INLINE void multiply_tile(Vec (&acc)[rows][vecs], const typename Math::Word* broadcast_words,
                                 std::int64_t row_stride, std::int64_t depth_stride,
                                 const typename Math::Word* lane_words, std::int64_t lane_stride, int depth) {
  for (int t = 0; t < depth; ++t) {
    typename Math::Operand lanes[vecs];
#pragma GCC unroll 8
    for (int v = 0; v < vecs; ++v) lanes[v] = Math::load_lanes(lane_words + v * vec_lanes);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const typename Math::Operand b = Math::splat(broadcast_words + r * row_stride);
#pragma GCC unroll 8
      for (int v = 0; v < vecs; ++v) acc[r][v] = Math::multiply_add(b, lanes[v], acc[r][v]);
    }
    broadcast_words += depth_stride;
    lane_words += lane_stride;
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
