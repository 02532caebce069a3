// The products of a short query on the matrix unit, for caches in bf16 and in 8 bits: 64 keys at a time.
//
//   S^T = K Q^T    16 keys x 16 rows at a time; K where it lies if its rows are at even distances
//   O  += P V      16 rows x 16 columns at a time; V in pairs of keys, 32 keys at once
//
// Rows are at most short_rows, half of a tile's 16. P takes both halves: weights rounded to bf16, and below
// them what rounding left, so that weights have 16 bits. Rows of O are in such halves, too.
#pragma once

#include "cpu/decode/products.hpp"

#if defined(TANDEM_MATRIX_UNIT)

#include "cpu/simd/bf16_bytes.hpp"
#include "cpu/simd/matrix_unit.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// A line of 64 bytes of K has 32 or 64 columns, in one or two tiles. 8-bit ones come out of their conversion
/// in an order of their own, which q has, too.
template <typename K>
struct TileScores {
  using Query = bf16;
  static constexpr int columns = tile_row_bytes / static_cast<int>(sizeof(K));

  /// Row `row` of q, `count` columns filled up with zeros to whole lines, becomes a column of the tiles `q`.
  static void place(const bf16* q_row, int count, int row, bf16* q) {
    for (int c = 0; c < count; c += 2) {
      int word = c / 2;
      if constexpr (sizeof(K) == 1) {  // of 64 columns, 8 of every 16 are in one tile
        const int in_line = c % 64;
        word = c / 64 * 32 + in_line % 16 / 8 * 16 + in_line / 16 * 4 + in_line % 8 / 2;
      }
      __builtin_memcpy(q + (word * 16 + row) * 2, q_row + c, 2 * sizeof(bf16));
    }
  }
};

constexpr int tile_numbers = tile_bytes / 4;
/// Columns of V that are worked on together: four tiles of O.
constexpr int value_columns = 64;

/// What a thread works in, beside what heads have of their own.
struct TileRoom {
  alignas(64) float by_key[4 * tile_numbers];  ///< S^T of a block
  alignas(64) float scores[short_rows * short_block];
  alignas(64) bf16 weights[2][16][32];                  ///< P: 32 keys of rows, high halves and then low ones
  alignas(64) unsigned char staged[2][4 * tile_bytes];  ///< K or V on its way
  MatrixUnit unit;

  TileRoom() { __builtin_memset(weights, 0, sizeof weights); }
};

/// Bytes [0, valid) of a line; all: whether that is all of it, which needs no mask.
template <bool all>
TANDEM_INLINE __m512i load_line(const void* p, __mmask64 valid) {
  if constexpr (all) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi8(valid, p);
}
TANDEM_INLINE __mmask64 first_bytes(std::int64_t count) {
  return count >= 64 ? ~0ULL : (1ULL << count) - 1ULL;
}

/// Copies the line at `column` of 16 keys into tiles.
template <typename K>
[[gnu::noinline]] void stage_keys(const K* const* k, std::int64_t column, std::int64_t columns_left,
                                  unsigned char* tiles) {
  const __mmask64 valid = first_bytes(columns_left * static_cast<std::int64_t>(sizeof(K)));
  for (int i = 0; i < 16; ++i) {
    const __m512i line = load_line<false>(k[i] + column, valid);
    unsigned char* const row = tiles + i * tile_row_bytes;
    if constexpr (sizeof(K) == 1) {
      const Bf16Bytes bytes = bf16_bytes<K>(line);
      _mm512_store_si512(row, _mm512_unpacklo_epi8(bytes.low, bytes.high));
      _mm512_store_si512(row + tile_bytes, _mm512_unpackhi_epi8(bytes.low, bytes.high));
    } else {
      _mm512_store_si512(row, line);
    }
  }
}

/// How many bytes the rows of 16 keys are apart; -1 if they lie at uneven distances.
template <typename K>
TANDEM_INLINE std::int64_t distance_of(const K* const* k) {
  const std::int64_t distance = k[1] - k[0];
  bool even = true;
  for (int i = 1; i < 15; ++i) even &= k[i + 1] - k[i] == distance;
  return even ? distance * static_cast<std::int64_t>(sizeof(K)) : -1;
}

/// S^T of 64 keys to room.by_key.
template <typename K>
TANDEM_INLINE void score_on_tiles(const K* const* k, std::int64_t offset, int columns, const bf16* q,
                                  TileRoom& room, int rows_ahead, RowsAhead<K>& ahead) {
  using Scores = TileScores<K>;
  std::int64_t distance[4];
  for (int g = 0; g < 4; ++g) distance[g] = sizeof(K) == 1 ? -1 : distance_of(k + 16 * g);
  clear_sums<32>();
  for (int c = 0; c < columns; c += Scores::columns) {
    load_tile<4>(q + c * 16, tile_row_bytes);
    if constexpr (sizeof(K) == 1) load_tile<7>(q + (c + 32) * 16, tile_row_bytes);
    const auto multiply = [&]<int g>() __attribute__((always_inline)) {
      const K* const* const keys = k + 16 * g;
      const void* tile = keys[0] + offset + c;
      std::int64_t stride = distance[g];
      if (stride < 0 || columns - c < Scores::columns) {
        tile = room.staged[g % 2];
        stride = tile_row_bytes;
        stage_keys(keys, offset + c, columns - c, room.staged[g % 2]);
      }
      load_tile<5 + g % 2>(tile, stride);
      multiply_tiles_bf16<g, 5 + g % 2, 4>();
      if constexpr (sizeof(K) == 1) {
        load_tile<5 + g % 2>(static_cast<const unsigned char*>(tile) + tile_bytes, stride);
        multiply_tiles_bf16<g, 5 + g % 2, 7>();
      }
      ahead.fetch(rows_ahead);
    };
    multiply.template operator()<0>();
    multiply.template operator()<1>();
    multiply.template operator()<2>();
    multiply.template operator()<3>();
  }
  store_tile<0>(room.by_key, tile_row_bytes);
  store_tile<1>(room.by_key + tile_numbers, tile_row_bytes);
  store_tile<2>(room.by_key + 2 * tile_numbers, tile_row_bytes);
  store_tile<3>(room.by_key + 3 * tile_numbers, tile_row_bytes);
}

/// room.by_key to room.scores, four rows from `first` on.
TANDEM_INLINE void turn_rows(TileRoom& room, int first) {
  for (int key = 0; key < 4 * 16; key += 16) {
    Vec r[4];
    for (int i = 0; i < 4; ++i) {  // keys i, 4 + i, 8 + i and 12 + i
      const float* const p = room.by_key + (key + i) * 16 + first;
      const __m512 two = _mm512_insertf32x4(_mm512_castps128_ps512(_mm_load_ps(p)), _mm_load_ps(p + 64), 1);
      r[i] =
          Vec{_mm512_insertf32x4(_mm512_insertf32x4(two, _mm_load_ps(p + 128), 2), _mm_load_ps(p + 192), 3)};
    }
    transpose_blocks(r[0], r[1], r[2], r[3]);
    for (int i = 0; i < 4; ++i) store(r[i], room.scores + (first + i) * short_block + key);
  }
}

/// Weights of row `row`, of whole 32 keys, as the sums of two bf16 each.
TANDEM_INLINE void place_weights(const float* p, int count, int row, TileRoom& room) {
  for (int j = 0; j < count; j += 32) {
    const Vec first = load(p + j);
    const Vec second = load(p + j + vec_lanes);
    const UVec high = join_bf16(first, second);
    const auto rest = [&](Vec whole, __m256i half) __attribute__((always_inline)) {
      return hn::Sub(whole, bits_as_f32(UVec{_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)}));
    };
    const UVec low = join_bf16(rest(first, _mm512_castsi512_si256(high.raw)),
                               rest(second, _mm512_extracti64x4_epi64(high.raw, 1)));
    _mm512_store_si512(room.weights[j / 32][row], high.raw);
    _mm512_store_si512(room.weights[j / 32][row + short_rows], low.raw);
  }
}

/// Two rows of V, value_columns wide, as a row of pairs in each of four tiles.
template <bool all, typename K>
TANDEM_INLINE void stage_values(const K* first, const K* second, std::int64_t columns_left,
                                unsigned char* row) {
  if constexpr (sizeof(K) == 1) {
    const __mmask64 valid = first_bytes(columns_left);
    const __m512i a = load_line<all>(first, valid);
    const __m512i b = load_line<all>(second, valid);
    const __m512i pairs[2] = {_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)};
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Bf16Bytes bytes = bf16_bytes<K>(pairs[i]);
      _mm512_store_si512(row + 2 * i * tile_bytes, _mm512_unpacklo_epi8(bytes.low, bytes.high));
      _mm512_store_si512(row + (2 * i + 1) * tile_bytes, _mm512_unpackhi_epi8(bytes.low, bytes.high));
    }
  } else {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const std::int64_t left = columns_left - 32 * i;
      const __mmask64 valid = left > 0 ? first_bytes(2 * left) : 0;
      const __m512i a = load_line<all>(first + 32 * i, valid);
      const __m512i b = load_line<all>(second + 32 * i, valid);
      _mm512_store_si512(row + 2 * i * tile_bytes, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(row + (2 * i + 1) * tile_bytes, _mm512_unpackhi_epi16(a, b));
    }
  }
}

/// The first of four neighbouring columns that lie in quarter `quarter` of rows of tile `tile` of four.
template <typename K>
constexpr int column_of(int tile, int quarter) {
  return sizeof(K) == 1 ? 16 * quarter + 4 * tile : 32 * (tile / 2) + 8 * quarter + 4 * (tile % 2);
}

/// out += P V for whole 32 keys, or = with `fresh`; out: tiles of 16 columns.
template <typename K>
TANDEM_INLINE void weigh_on_tiles(const K* const* v, std::int64_t offset, int count, TileRoom& room,
                                  bool fresh, float* out, int columns, int rows_ahead, RowsAhead<K>& ahead) {
  for (int c = 0; c < columns; c += value_columns, out += 4 * tile_numbers) {
    if (fresh) {
      clear_sums<32>();
    } else {
      load_tile<0>(out, tile_row_bytes);
      load_tile<1>(out + tile_numbers, tile_row_bytes);
      load_tile<2>(out + 2 * tile_numbers, tile_row_bytes);
      load_tile<3>(out + 3 * tile_numbers, tile_row_bytes);
    }
    for (int j = 0; j < count; j += 32) {
      unsigned char* const tiles = room.staged[j / 32 % 2];
      const auto stage = [&]<bool all>() __attribute__((always_inline)) {
        for (int i = 0; i < 16; ++i) {
          ahead.fetch(rows_ahead);
          const K* const* const pair = v + j + 2 * i;
          stage_values<all>(pair[0] + offset + c, pair[1] + offset + c, columns - c,
                            tiles + i * tile_row_bytes);
        }
      };
      if (columns - c >= value_columns) {
        stage.template operator()<true>();
      } else {
        stage.template operator()<false>();
      }
      load_tile<4>(room.weights[j / 32], tile_row_bytes);
      load_tile<5>(tiles, tile_row_bytes);
      multiply_tiles_bf16<0, 4, 5>();
      load_tile<6>(tiles + tile_bytes, tile_row_bytes);
      multiply_tiles_bf16<1, 4, 6>();
      load_tile<5>(tiles + 2 * tile_bytes, tile_row_bytes);
      multiply_tiles_bf16<2, 4, 5>();
      load_tile<6>(tiles + 3 * tile_bytes, tile_row_bytes);
      multiply_tiles_bf16<3, 4, 6>();
    }
    store_tile<0>(out, tile_row_bytes);
    store_tile<1>(out + tile_numbers, tile_row_bytes);
    store_tile<2>(out + 2 * tile_numbers, tile_row_bytes);
    store_tile<3>(out + 3 * tile_numbers, tile_row_bytes);
  }
}

/// Multiplies a row of O, whose tiles are `tiles`: four for every value_columns.
TANDEM_INLINE void scale_tile_row(float* tiles, int columns, int row, float factor) {
  const int count = (columns + value_columns - 1) / value_columns * 4;
  for (int i = 0; i < count; ++i, tiles += tile_numbers) {
    for (float* const p : {tiles + row * 16, tiles + (row + short_rows) * 16}) {
      store(hn::Mul(load(p), broadcast(factor)), p);
    }
  }
}

/// O out of its tiles: both halves of every row, columns in order.
template <typename K>
void leave_tiles(const float* tiles, int rows, int columns, float* out) {
  for (int r = 0; r < rows; ++r, out += columns) {
    for (int c = 0; c < columns; c += value_columns) {
      alignas(64) float in_order[value_columns];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {  // four columns each
        const float* const p = tiles + (c / 16 + i / 4) * tile_numbers + r * 16 + i % 4 * 4;
        _mm_store_ps(in_order + column_of<K>(i / 4, i % 4),
                     _mm_add_ps(_mm_load_ps(p), _mm_load_ps(p + short_rows * 16)));
      }
      const int left = columns - c < value_columns ? columns - c : value_columns;
      __builtin_memcpy(out + c, in_order, static_cast<std::size_t>(left) * sizeof(float));
    }
  }
}

template <typename Scores>
constexpr bool on_tiles = false;
template <typename K>
constexpr bool on_tiles<TileScores<K>> = true;

template <typename Scores>
struct RoomFor {
  struct Type {};
};
template <typename K>
struct RoomFor<TileScores<K>> {
  using Type = TileRoom;
};

}  // namespace tandem::cpu::TANDEM_TARGET

#else

namespace tandem::cpu::TANDEM_TARGET {

template <typename Scores>
constexpr bool on_tiles = false;
template <typename Scores>
struct RoomFor {
  struct Type {};
};

}  // namespace tandem::cpu::TANDEM_TARGET

#endif

namespace tandem::cpu::TANDEM_TARGET {

/// What attention by Scores works in.
template <typename Scores>
using RoomOf = typename RoomFor<Scores>::Type;
template <typename Scores>
constexpr int keys_of_block = on_tiles<Scores> ? short_block : vector_block;

}  // namespace tandem::cpu::TANDEM_TARGET
