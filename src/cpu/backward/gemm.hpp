// The one register tile that all five products of the backward pass run through.
//
// A "word" is 32 bits along the dimension that is summed over: one f32, or, where the processor multiplies
// bf16, a pair of them. C (rows x panel_lanes) = or += A (rows x depth) B (depth x panel_lanes): words of A
// are broadcast from any pair of strides, B is a packed panel, read once from start to end. What is added to
// C has a sum of its own first, so that a long sum is one of blocks (forward/lane_totals.hpp says why).
#pragma once

#include "cpu/simd/dot.hpp"
#include "cpu/simd/matrix_unit.hpp"
#include "cpu/simd/vec.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// Columns of a panel: two registers, so that every broadcast feeds two multiply-adds.
constexpr int panel_lanes = 2 * vec_lanes;
/// Rows of the register tile: 12 x 2 accumulators, or 6 x 2 with 16 registers, hide the latency (4 cycles
/// f32, 6 bf16) and leave room for the operands. 12 x 2, 8 x 3 and 6 x 4 all reach 94 % of peak at depth 128.
constexpr int register_rows = vec_registers == 32 ? 12 : 6;
/// Keys of a strip. A matrix unit takes 32 rows at a time, and 16 words of depth.
constexpr int strip_rows = has_matrix_unit ? 32 : register_rows;

template <bool paired>
TANDEM_INLINE Vec multiply_add(Vec sum, Vec a, Vec b) {
  if constexpr (paired) {
    return dot_bf16(sum, f32_as_bits(a), f32_as_bits(b));
  } else {
    return hn::MulAdd(a, b, sum);
  }
}

/// Element (row, i) of A is a[row * row_step + i * step]; row r of C starts at c + r * c_stride.
struct Product {
  const float* a;
  std::int64_t row_step;
  std::int64_t step;
  const float* b;
  std::int64_t depth;
  float* c;
  std::int64_t c_stride;
};

template <bool paired, int rows, bool accumulate>
void multiply_tile(const Product& p) {
  // Every loop over accumulators is unrolled by name: otherwise the compiler keeps a copy of them in memory
  // around the loop over i, which costs 150 cycles a tile.
  Vec sum[rows][2];
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) sum[r][0] = sum[r][1] = zero();
  if constexpr (accumulate) {  // C is added at the end, and may be as far away as memory
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      __builtin_prefetch(p.c + r * p.c_stride, 1);
      __builtin_prefetch(p.c + r * p.c_stride + vec_lanes, 1);
    }
  }
  // A pointer for every third row: with offsets 0, 1 and 2 row_steps all addresses fit the machine's
  // registers.
  constexpr int pointers = (rows + 2) / 3;
  const float* a[pointers];
  for (int g = 0; g < pointers; ++g) a[g] = p.a + 3 * g * p.row_step;
  const std::int64_t offset[3] = {0, p.row_step, 2 * p.row_step};
  const float* b = p.b;
  for (std::int64_t i = 0; i < p.depth; ++i, b += panel_lanes) {
    const Vec b0 = load(b);
    const Vec b1 = load(b + vec_lanes);
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      const Vec word = broadcast(a[r / 3][offset[r % 3]]);
      sum[r][0] = multiply_add<paired>(sum[r][0], word, b0);
      sum[r][1] = multiply_add<paired>(sum[r][1], word, b1);
    }
#pragma GCC unroll 4
    for (int g = 0; g < pointers; ++g) a[g] += p.step;
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) {
    float* const c = p.c + r * p.c_stride;
    store(accumulate ? hn::Add(load(c), sum[r][0]) : sum[r][0], c);
    store(accumulate ? hn::Add(load(c + vec_lanes), sum[r][1]) : sum[r][1], c + vec_lanes);
  }
}

template <bool paired, bool accumulate, int rows>
TANDEM_INLINE void multiply_if(Product& p, int& left) {
  while (left >= rows) {
    multiply_tile<paired, rows, accumulate>(p);
    p.a += rows * p.row_step;
    p.c += rows * p.c_stride;
    left -= rows;
  }
}

#if defined(TANDEM_MATRIX_UNIT)
/// 32 rows of C.
template <bool accumulate>
TANDEM_INLINE void multiply_32_rows(const Product& p, float* c, std::int64_t c_stride) {
  if constexpr (accumulate) {
    load_sums<panel_lanes>(c, c_stride);
  } else {
    clear_sums<panel_lanes>();
  }
  const TileRows rows{.tiles = p.a, .stride = p.row_step, .below = 16 * p.row_step, .step = 16};
  add_products_of_tiles<panel_lanes>(rows, p.b, panel_lanes, p.depth / 16);
  store_sums<panel_lanes>(c, c_stride);
}

/// Words of A follow one another; its rows reach to a whole 32, and what they hold past `rows` is left out.
/// The unit adds up 32 elements before it adds them to C, which is the sum of their own elsewhere.
template <bool accumulate>
void multiply_by_tiles(Product p, int rows) {
  for (; rows >= 32; rows -= 32, p.a += 32 * p.row_step, p.c += 32 * p.c_stride) {
    multiply_32_rows<accumulate>(p, p.c, p.c_stride);
  }
  if (rows == 0) return;
  alignas(64) float c[32 * panel_lanes];
  multiply_32_rows<false>(p, c, panel_lanes);
  for (int r = 0; r < rows; ++r) {
    for (int n = 0; n < panel_lanes; n += vec_lanes) {
      float* const to = p.c + r * p.c_stride + n;
      const Vec sum = load(c + r * panel_lanes + n);
      store(accumulate ? hn::Add(load(to), sum) : sum, to);
    }
  }
}
#endif

/// Any number of rows: whole strips, then what is left in tiles of 8, 4, 2 and 1.
template <bool paired, bool accumulate>
void multiply(Product p, int rows) {
#if defined(TANDEM_MATRIX_UNIT)
  if constexpr (paired) return multiply_by_tiles<accumulate>(p, rows);
#endif
  multiply_if<paired, accumulate, register_rows>(p, rows);
  if constexpr (register_rows > 8) multiply_if<paired, accumulate, 8>(p, rows);
  multiply_if<paired, accumulate, 4>(p, rows);
  multiply_if<paired, accumulate, 2>(p, rows);
  multiply_if<paired, accumulate, 1>(p, rows);
}

}  // namespace tandem::cpu::TANDEM_TARGET
