// The two products of a short query: few rows against a block of keys, with dot products along head_dim.
#pragma once

#include "cpu/decode/operands.hpp"
#include "cpu/decode/rows_ahead.hpp"
#include "cpu/forward/finish_row.hpp"
#include "cpu/simd/dot.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// scores[row][key] for keys_together keys and `rows` rows of q.
template <typename Scores, int rows, typename K>
TANDEM_INLINE void score_keys(const K* const* keys, std::int64_t offset, const typename Scores::Query* q,
                              int columns, float* scores) {
  const int q_stride = query_stride<Scores>(columns);
  Vec acc[rows][keys_together];
  for (auto& row : acc) {
    for (Vec& a : row) a = zero();
  }
  const K* k[keys_together];
  for (int j = 0; j < keys_together; ++j) k[j] = keys[j] + offset;
  const auto step = [&](int c, auto load_key) __attribute__((always_inline)) {
    typename Scores::Operand key[keys_together];
#pragma GCC unroll 4
    for (int j = 0; j < keys_together; ++j) key[j] = load_key(k[j] + c);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const typename Scores::Operand query = Scores::query(q + r * q_stride + c);
#pragma GCC unroll 4
      for (int j = 0; j < keys_together; ++j) {
        acc[r][j] = Scores::multiply_add(query, key[j], acc[r][j]);
      }
    }
  };
  int c = 0;
  for (; c + Scores::columns <= columns; c += Scores::columns) {
    step(
        c, [](const K* p) __attribute__((always_inline)) { return Scores::key(p); });
  }
  if (c < columns) {
    step(
        c, [&](const K* p) __attribute__((always_inline)) {
          K rest[Scores::columns] = {};
          __builtin_memcpy(rest, p, static_cast<unsigned long>(columns - c) * sizeof(K));
          return Scores::key(rest);
        });
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
    store_sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3], scores + r * short_block);
  }
}

/// Whether weigh_columns() has bf16 split, two registers at a time.
template <typename K, int vecs>
constexpr bool splits = HWY_TARGET <= HWY_AVX3&& __is_same(K, bf16) && vecs % 2 == 0;

/// Widens `vecs` registers of columns.
template <int vecs, typename K>
TANDEM_INLINE void load_columns(const K* p, Vec (&value)[vecs]) {
#if HWY_TARGET <= HWY_AVX3
  if constexpr (splits<K, vecs>) {
#pragma GCC unroll 2
    for (int i = 0; i < vecs; i += 2) {
      const Split both = split(p + i * vec_lanes);
      value[i] = both.even;
      value[i + 1] = both.odd;
    }
    return;
  }
#endif
#if defined(__AVX512BF16__)
  if constexpr (__is_same(K, e4m3) && vecs % 2 == 0) {
#pragma GCC unroll 4
    for (int i = 0; i < vecs; i += 2) {
      const __m512i pair = bf16_of(p + i * vec_lanes).raw;
      const __m512i first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(pair));
      const __m512i second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(pair, 1));
      value[i] = bits_as_f32(UVec{_mm512_slli_epi32(first, 16)});
      value[i + 1] = bits_as_f32(UVec{_mm512_slli_epi32(second, 16)});
    }
    return;
  }
#endif
#pragma GCC unroll 4
  for (int i = 0; i < vecs; ++i) value[i] = load(p + i * vec_lanes);
}

/// out[row] += sum over keys of p[row][key] * v[key], `vecs` registers of columns at a time.
template <int rows, int vecs, typename K>
TANDEM_INLINE void weigh_columns(const K* const* v, std::int64_t offset, int count, const float* p,
                                 float* out, int out_stride, RowsAhead<K>& ahead) {
  Vec acc[rows][vecs];
  for (auto& row : acc) {
    for (Vec& a : row) a = zero();
  }
  for (int j = 0; j < count; ++j) {
    ahead.fetch(1);
    Vec value[vecs];
    load_columns(v[j] + offset, value);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const Vec weight = broadcast(p[r * short_block + j]);
#pragma GCC unroll 4
      for (int i = 0; i < vecs; ++i) acc[r][i] = hn::MulAdd(weight, value[i], acc[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < vecs; ++i) {
      float* const sum = out + r * out_stride + i * vec_lanes;
      Vec more = acc[r][i];
#if HWY_TARGET <= HWY_AVX3
      if constexpr (splits<K, vecs>) more = in_order({acc[r][i & ~1], acc[r][i | 1]}, i % 2);
#endif
      store(hn::Add(load(sum), more), sum);
    }
  }
}

#if defined(__AVX512BF16__)
/// Weights as the sums of two bf16 each, which keep 16 bits. A product with a pair of keys then takes two dot
/// products in place of two multiply-adds, and e4m3 need not be widened to f32, which takes longer than both.
template <int rows>
struct PairWeights {
  alignas(64) std::uint16_t high[rows][2 * vec_lanes];
  alignas(64) std::uint16_t low[rows][2 * vec_lanes];

  /// Splits p[row][key], which is 0 from `count` on.
  explicit PairWeights(const float* p, int count) {
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const float* const row = p + r * short_block;
      const Vec first = load(row);
      const Vec second = short_block > vec_lanes && count > vec_lanes ? load(row + vec_lanes) : zero();
      const UVec rounded = join_bf16(first, second);
      hn::StoreU(rounded, u32_lanes, reinterpret_cast<std::uint32_t*>(high[r]));
      const UVec rest = join_bf16(hn::Sub(first, widened(rounded, 0)), hn::Sub(second, widened(rounded, 1)));
      hn::StoreU(rest, u32_lanes, reinterpret_cast<std::uint32_t*>(low[r]));
    }
  }

 private:
  [[gnu::always_inline]] static Vec widened(UVec pair, int half) {
    const __m256i part =
        half == 0 ? _mm512_castsi512_si256(pair.raw) : _mm512_extracti64x4_epi64(pair.raw, 1);
    return bits_as_f32(UVec{_mm512_slli_epi32(_mm512_cvtepu16_epi32(part), 16)});
  }
};

/// Two weights of neighbouring keys in every lane.
TANDEM_INLINE UVec broadcast_pair(const std::uint16_t* p) {
  std::uint32_t both = 0;
  __builtin_memcpy(&both, p, sizeof both);
  return hn::Set(u32_lanes, both);
}

/// As weigh_columns, `vecs` registers of 32 columns at a time, two keys at a time.
template <int rows, int vecs, typename K>
TANDEM_INLINE void weigh_pairs(const K* const* v, std::int64_t offset, int count,
                               const PairWeights<rows>& weights, float* out, int out_stride,
                               RowsAhead<K>& ahead) {
  // Two sums for a register of columns: the first four of every eight, and the last four.
  Vec acc[rows][vecs][2];
  for (auto& row : acc) {
    for (auto& part : row) part[0] = part[1] = zero();
  }
  const auto step = [&](int j, auto load_second) __attribute__((always_inline)) {
    ahead.fetch(2);
    __m512i pair[vecs][2];
#pragma GCC unroll 2
    for (int i = 0; i < vecs; ++i) {
      const __m512i first = bf16_of(v[j] + offset + i * 2 * vec_lanes).raw;
      const __m512i second = load_second(i);
      pair[i][0] = _mm512_unpacklo_epi16(first, second);
      pair[i][1] = _mm512_unpackhi_epi16(first, second);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const UVec high = broadcast_pair(weights.high[r] + j);
      const UVec low = broadcast_pair(weights.low[r] + j);
#pragma GCC unroll 2
      for (int i = 0; i < vecs; ++i) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const UVec values{pair[i][half]};
          acc[r][i][half] = dot_bf16(dot_bf16(acc[r][i][half], high, values), low, values);
        }
      }
    }
  };
  int j = 0;
  for (; j + 2 <= count; j += 2) {
    step(
        j, [&](int i)
               __attribute__((always_inline)) { return bf16_of(v[j + 1] + offset + i * 2 * vec_lanes).raw; });
  }
  if (j < count) {
    step(
        j, [](int) __attribute__((always_inline)) { return _mm512_setzero_si512(); });
  }
  const __m512i in_order[2] = {
      _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
      _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)};
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int i = 0; i < vecs; ++i) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        float* const sum = out + r * out_stride + (2 * i + half) * vec_lanes;
        const Vec more{_mm512_permutex2var_ps(acc[r][i][0].raw, in_order[half], acc[r][i][1].raw)};
        store(hn::Add(load(sum), more), sum);
      }
    }
  }
}
#endif

/// out[row] += sum over keys of p[row][key] * v[key].
template <typename Scores, int rows, typename K>
TANDEM_INLINE void weigh(const K* const* v, std::int64_t offset, int count, const float* p, float* out,
                         int columns, RowsAhead<K>& ahead) {
  constexpr int vecs = 4;
  int c = 0;
#if defined(__AVX512BF16__)
  if constexpr (__is_same(Scores, PairScores<e4m3>)) {
    const PairWeights<rows> weights(p, count);
    for (; c + 2 * Scores::columns <= columns; c += 2 * Scores::columns) {
      weigh_pairs<rows, 2>(v, offset + c, count, weights, out + c, columns, ahead);
    }
    for (; c + Scores::columns <= columns; c += Scores::columns) {
      weigh_pairs<rows, 1>(v, offset + c, count, weights, out + c, columns, ahead);
    }
  }
#endif
  for (; c + vecs * vec_lanes <= columns; c += vecs * vec_lanes) {
    weigh_columns<rows, vecs>(v, offset + c, count, p, out + c, columns, ahead);
  }
  for (; c + vec_lanes <= columns; c += vec_lanes) {
    weigh_columns<rows, 1>(v, offset + c, count, p, out + c, columns, ahead);
  }
  for (; c < columns; ++c) {
    for (int r = 0; r < rows; ++r) {
      float sum = 0.0F;
      for (int j = 0; j < count; ++j) sum += p[r * short_block + j] * to_f32(v[j][offset + c]);
      out[r * columns + c] += sum;
    }
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
