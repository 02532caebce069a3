// The two products of a tile on the matrix unit. Tiles are blocks of 16 x 16 words:
//
//   S^T = K Q^T      32 keys x 32 rows at a time; A is K, B Q^T as it is packed for every target
//   O^T += V^T P^T   32 columns of V x 32 rows at a time; A is V^T, B P^T as exponentiate() leaves it
#pragma once

#if defined(TANDEM_MATRIX_UNIT)

#include "cpu/forward/ahead.hpp"
#include "cpu/forward/stripe.hpp"
#include "cpu/simd/matrix_unit.hpp"
#include "cpu/simd/product.hpp"
#include "cpu/simd/stage.hpp"
#include "cpu/simd/transpose.hpp"

namespace tandem::cpu::TANDEM_TARGET {

constexpr int tile_words = 256;
constexpr int tile_lanes = stripe_lanes<TileMath>;

/// Scores of 32 keys, whose tiles start at `k`.
template <int vecs>
TANDEM_INLINE void score_tiles(const std::uint32_t* k, int steps, const std::uint32_t* q, float* scores) {
  clear_sums<16 * vecs>();
  const TileRows keys{
      .tiles = k, .stride = 16, .below = static_cast<std::int64_t>(steps) * tile_words, .step = tile_words};
  add_products_of_tiles<16 * vecs>(keys, q, tile_lanes, steps);
  store_sums<16 * vecs>(scores, tile_lanes);
}

/// 32 columns of O^T, which is 0 if it is fresh. The unit adds up 32 keys before it adds them to O, which is
/// what a block's own sum is for elsewhere.
template <int vecs>
TANDEM_INLINE void accumulate_tiles(const std::uint32_t* v, std::int64_t v_step, const std::uint32_t* p,
                                    int steps, float* out, bool fresh) {
  if (fresh) {
    clear_sums<16 * vecs>();
  } else {
    load_sums<16 * vecs>(out, tile_lanes);
  }
  const TileRows columns{.tiles = v, .stride = 16, .below = tile_words, .step = v_step};
  add_products_of_tiles<16 * vecs>(columns, p, tile_lanes, steps);
  store_sums<16 * vecs>(out, tile_lanes);
}

/// S^T = K Q^T for `count` keys, the last 32 of which may reach past them.
template <typename Math, int vecs>
requires on_tiles<Math>
[[gnu::noinline]] void score(const std::uint32_t* k, std::int64_t k_stride, int count, const std::uint32_t* q,
                             int depth, float* scores, Ahead& ahead) {
  const int steps = (depth + 15) / 16;
  for (int j = 0; j < count; j += 32) {
    ahead.fetch_share();
    score_tiles<vecs>(k + j * k_stride, steps, q, scores + j * tile_lanes);
  }
}

/// O^T += V^T P^T over `depth` pairs of keys; P is cleared here up to a whole tile.
template <typename Math, int vecs>
requires on_tiles<Math>
[[gnu::noinline]] void accumulate(const std::uint32_t* v, std::int64_t v_stride, int dims, std::uint32_t* p,
                                  int depth, float* out, bool fresh = false) {
  const int steps = (depth + 15) / 16;
  for (int i = depth; i < steps * 16; ++i) {
    __builtin_memset(p + i * tile_lanes, 0, vecs * vec_lanes * sizeof(std::uint32_t));
  }
  for (int c = 0; c < dims; c += 32) {
    accumulate_tiles<vecs>(v + c * 16, 16 * v_stride, p, steps, out + c * tile_lanes, fresh);
  }
}

/// Rows of pairs of columns -> tiles, 16 keys high. Keys from `count` on are 0 up to a whole 32.
static inline void tile_keys(const std::uint32_t* rows, std::int64_t stride, int count, int words,
                             std::uint32_t* tiles) {
  const int steps = (words + 15) / 16;
  for (int key = 0; key < (count + 31) / 32 * 32; ++key) {
    for (int step = 0; step < steps; ++step) {
      const int valid = key >= count ? 0 : words - 16 * step < 16 ? words - 16 * step : 16;
      const auto lanes = static_cast<__mmask16>((1U << valid) - 1U);
      _mm512_store_si512(tiles + ((key / 16 * steps + step) * 16 + key % 16) * 16,
                         _mm512_maskz_loadu_epi32(lanes, rows + key * stride + 16 * step));
    }
  }
}

/// `rows[i]` is row i of K, `words` pairs of columns: as tile_keys() has them.
static inline void tile_key_rows(const bf16* const* rows, int count, int words, std::uint32_t* tiles) {
  const int steps = (words + 15) / 16;
  for (int key = 0; key < (count + 31) / 32 * 32; ++key) {
    std::uint32_t* to = tiles + (key / 16 * steps * 16 + key % 16) * 16;
    for (int word = 0; word < words; word += 16, to += tile_words) {
      const int valid = key >= count ? 0 : words - word < 16 ? words - word : 16;
      const auto lanes = static_cast<__mmask16>((1U << valid) - 1U);
      const bf16* const from = key < count ? rows[key] + 2 * word : nullptr;
      _mm512_store_si512(to, _mm512_maskz_loadu_epi32(lanes, from));
    }
  }
}

/// `rows[i]` is row i of V -> V^T in tiles, 32 keys wide, with zeros up to whole tiles. Eight rows at a time
/// become four rows of pairs of keys, whose 4 x 4 blocks are transposed.
static inline void tile_value_rows(const bf16* const* rows, int count, int columns, std::uint32_t* tiles) {
  const int wide = in_tiles(columns);
  const auto as_vec = [](__m512i x) { return Vec{_mm512_castsi512_ps(x)}; };
  for (int key = 0; key < (count + 31) / 32 * 32; key += 8) {
    auto* const at = reinterpret_cast<float*>(tiles + key / 32 * 16 * wide + key % 32 / 2);
    for (int c = 0; c < wide; c += 32) {
      const auto lanes = columns - c >= 32 ? ~__mmask32{0} : (__mmask32{1} << (columns - c)) - 1U;
      Vec low[4];   // columns 0 to 3 of each eight
      Vec high[4];  // and 4 to 7
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const auto load_row = [&](int j) __attribute__((always_inline)) {
          return j < count ? _mm512_maskz_loadu_epi16(lanes, rows[j] + c) : _mm512_setzero_si512();
        };
        const __m512i even = load_row(key + 2 * i);
        const __m512i odd = load_row(key + 2 * i + 1);
        low[i] = as_vec(_mm512_unpacklo_epi16(even, odd));
        high[i] = as_vec(_mm512_unpackhi_epi16(even, odd));
      }
      transpose_blocks(low[0], low[1], low[2], low[3]);
      transpose_blocks(high[0], high[1], high[2], high[3]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        store_blocks(low[i], at + (c + i) * 16, 8 * 16);
        store_blocks(high[i], at + (c + 4 + i) * 16, 8 * 16);
      }
    }
  }
}

/// Rows of V in pairs -> V^T in tiles, 32 keys wide, with zeros up to whole tiles.
static inline void tile_values(std::uint32_t* pairs, std::int64_t stride, int count, int columns,
                               std::uint32_t* tiles) {
  const int wide = in_tiles(columns);
  for (int pair = (count + 1) / 2; pair < (count + 31) / 32 * 16; ++pair) {
    __builtin_memset(pairs + pair * stride, 0, static_cast<std::size_t>(columns) * sizeof(std::uint32_t));
  }
  for (int key = 0; key < count; key += 32, tiles += 16 * wide) {
    transpose(reinterpret_cast<const float*>(pairs + key / 2 * stride), stride, 16, columns,
              reinterpret_cast<float*>(tiles), 16);
    __builtin_memset(tiles + 16 * columns, 0,
                     static_cast<std::size_t>(wide - columns) * 16 * sizeof(std::uint32_t));
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET

#endif
