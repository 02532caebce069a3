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

/// 32 columns of O^T. The unit adds up 32 keys before it adds them to O, which is what a block's own sum is
/// for elsewhere.
template <int vecs>
TANDEM_INLINE void accumulate_tiles(const std::uint32_t* v, std::int64_t v_step, const std::uint32_t* p,
                                    int steps, float* out) {
  load_sums<16 * vecs>(out, tile_lanes);
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
                                  int depth, float* out) {
  const int steps = (depth + 15) / 16;
  for (int i = depth; i < steps * 16; ++i) {
    __builtin_memset(p + i * tile_lanes, 0, vecs * vec_lanes * sizeof(std::uint32_t));
  }
  for (int c = 0; c < dims; c += 32) {
    accumulate_tiles<vecs>(v + c * 16, 16 * v_stride, p, steps, out + c * tile_lanes);
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
