// A block of K and V on its way from the user's memory into what the forward kernel's products read.
#pragma once

#include "cpu/forward/key_rows.hpp"
#include "cpu/forward/softmax.hpp"
#include "cpu/forward/tile_products.hpp"
#include "cpu/simd/product.hpp"
#include "cpu/simd/stage.hpp"

namespace tandem::cpu::TANDEM_TARGET {

#if defined(__AVX512BF16__)
/// Stages pairs of 8-bit values, all of which bf16 has.
template <typename K>
void stage_converted_pairs(const ForwardTile& t, const ForwardScratch& layout, std::int64_t begin, int count,
                           Block<Bf16Math>& b) {
  auto* const k = reinterpret_cast<Bf16Math::Word*>(t.scratch + layout.k);
  auto* const v = reinterpret_cast<Bf16Math::Word*>(t.scratch + layout.v);
  b.k = k;
  b.k_stride = t.head_dim_qk / 2;
  b.v = v;
  b.v_stride = staged_stride(t.head_dim_v);
  const K* even = nullptr;
  for_each_run<K>(t, begin, count, [&](int first, const KeyRun<K>& run) {
    for (int j = 0; j < run.count; ++j) {
      const int key = first + j;
      convert_row(run.k + j * t.k_stride, t.head_dim_qk, reinterpret_cast<bf16*>(k + key * b.k_stride));
      const K* const row = run.v + j * t.v_stride;
      if (key % 2 == 0) even = row;
      if (key % 2 == 1 || key + 1 == count) {
        pair_converted(even, key % 2 == 1 ? row : nullptr, t.head_dim_v, v + key / 2 * b.v_stride);
      }
    }
  });
}

#if !defined(TANDEM_MATRIX_UNIT)
/// Words of K are pairs of columns, and those of V pairs of rows.
static void stage_pairs(const ForwardTile& t, const ForwardScratch& layout, std::int64_t begin, int count,
                        Block<Bf16Math>& b) {
  using Word = Bf16Math::Word;
  const KeyRun<bf16> whole = key_run<bf16>(t, begin, count);
  b.k = reinterpret_cast<const Word*>(whole.k);
  b.k_stride = t.k_stride / 2;
  if (whole.count < count ||
      t.k_stride % 2 != 0) {  // with an odd stride every second row starts inside a word
    auto* copy = reinterpret_cast<Word*>(t.scratch + layout.k);
    b.k = copy;
    b.k_stride = t.head_dim_qk / 2;
    for_each_run<bf16>(t, begin, count, [&](int first, const KeyRun<bf16>& run) {
      for (int j = 0; j < run.count; ++j) {
        __builtin_memcpy(copy + (first + j) * b.k_stride, run.k + j * t.k_stride,
                         static_cast<std::size_t>(b.k_stride) * sizeof(Word));
      }
    });
  }
  auto* paired = reinterpret_cast<Word*>(t.scratch + layout.v);
  b.v = paired;
  b.v_stride = staged_stride(t.head_dim_v);
  for (int first = 0; first < count;) {
    KeyRun<bf16> run = key_run<bf16>(t, begin + first, count - first);
    std::int64_t stride = t.v_stride;
    if (run.count % 2 != 0 && first + run.count < count) {
      if (run.count > 1) {
        --run.count;
      } else {  // a pair of two pages
        stride = key_run<bf16>(t, begin + first + 1, 1).v - run.v;
        run.count = 2;
      }
    }
    pair_rows(run.v, stride, run.count, t.head_dim_v, paired + first / 2 * b.v_stride, b.v_stride);
    first += run.count;
  }
}
#endif
#endif

/// Whether v is the first columns of k, as in a cache of latent vectors: one converted row serves both.
inline bool lies_in_k(const ForwardTile& t) {
  return t.v == t.k && t.v_stride == t.k_stride && t.head_dim_v <= t.head_dim_qk &&
         (t.pages.table == nullptr || t.pages.v_stride == t.pages.k_stride);
}

#if defined(TANDEM_MATRIX_UNIT)
/// Rows of bf16 become tiles.
static void stage_rows_in_tiles(const ForwardTile& t, const ForwardScratch& layout, std::int64_t begin,
                                int count, Block<TileMath>& b) {
  const bf16* k_rows[max_block_k];
  const bf16* v_rows[max_block_k];
  for_each_run<bf16>(t, begin, count, [&](int first, const KeyRun<bf16>& run) {
    for (int j = 0; j < run.count; ++j) {
      k_rows[first + j] = run.k + j * t.k_stride;
      v_rows[first + j] = run.v + j * t.v_stride;
    }
  });
  auto* const k = reinterpret_cast<TileMath::Word*>(t.scratch + layout.k);
  auto* const v = reinterpret_cast<TileMath::Word*>(t.scratch + layout.v);
  tile_key_rows(k_rows, count, t.head_dim_qk / 2, k);
  tile_value_rows(v_rows, count, t.head_dim_v, v);
  b.k = k;
  b.k_stride = in_tiles(t.head_dim_qk) / 2;
  b.v = v;
  b.v_stride = in_tiles(t.head_dim_v);
}

/// Pairs become tiles, which take the halves of the scratch memory that pairs leave.
static void stage_tiles(const ForwardTile& t, const ForwardScratch& layout, int count,
                        const Block<Bf16Math>& pairs, Block<TileMath>& b) {
  const auto half = [&](std::size_t begin, std::size_t end) {
    return reinterpret_cast<TileMath::Word*>(t.scratch + begin + (end - begin) / 2 / 64 * 64);
  };
  auto* const k = half(layout.k, layout.v);
  auto* const v = half(layout.v, layout.rows);
  tile_keys(pairs.k, pairs.k_stride, count, t.head_dim_qk / 2, k);
  tile_values(reinterpret_cast<TileMath::Word*>(t.scratch + layout.v), pairs.v_stride, count, t.head_dim_v,
              v);
  b.k = k;
  b.k_stride = in_tiles(t.head_dim_qk) / 2;
  b.v = v;
  b.v_stride = in_tiles(t.head_dim_v);
}
#endif

/// Whether rows at this distance, in f32, share few sets of the first-level cache: of 4 KiB all share one.
inline bool crowded(std::int64_t stride) {
  return stride % 1024 == 0;
}

/// Whether f32 V is copied to rows at a better distance. Columns of V are read down the keys: at 512 bytes a
/// block's rows take 8 of 64 sets, and every line comes from the second-level cache several times. A copy
/// costs as much as a hundredth of the products of 128 rows.
inline bool copies_values(const ForwardTile& t) {
  return crowded(t.v_stride) || (t.v_stride % 128 == 0 && t.count > 128);
}

/// Where the block's K and V are: in the user's memory where the products can read it, else converted into
/// scratch.
template <typename Math, typename K>
Block<Math> stage(const ForwardTile& t, const ForwardScratch& layout, std::int64_t begin, int count) {
  using Word = typename Math::Word;
  Block<Math> b;
  b.begin = begin;
  b.count = count;
  if constexpr (Math::elements_per_word == 1) {
    const KeyRun<K> whole = key_run<K>(t, begin, count);
    if constexpr (sizeof(K) == sizeof(Word)) {
      if (whole.count == count) {
        b.k = whole.k;
        b.k_stride = t.k_stride;
        b.v = whole.v;
        b.v_stride = t.v_stride;
        if (crowded(t.k_stride)) {
          auto* const k = reinterpret_cast<float*>(t.scratch + layout.k);
          b.k = k;
          b.k_stride = staged_stride(t.head_dim_qk);
          widen_rows(whole.k, t.k_stride, count, t.head_dim_qk, k, b.k_stride);
        }
        if (copies_values(t)) {
          auto* const v = reinterpret_cast<float*>(t.scratch + layout.v);
          b.v = v;
          b.v_stride = staged_stride(t.head_dim_v);
          widen_rows(whole.v, t.v_stride, count, t.head_dim_v, v, b.v_stride);
        }
        return b;
      }
    }
    auto* staged_k = reinterpret_cast<float*>(t.scratch + layout.k);
    const bool shared = lies_in_k(t);
    auto* staged_v = shared ? staged_k : reinterpret_cast<float*>(t.scratch + layout.v);
    b.k = staged_k;
    b.k_stride = staged_stride(t.head_dim_qk);
    b.v = staged_v;
    b.v_stride = shared ? b.k_stride : staged_stride(t.head_dim_v);
    for_each_run<K>(t, begin, count, [&](int first, const KeyRun<K>& run) {
      widen_rows(run.k, t.k_stride, run.count, t.head_dim_qk, staged_k + first * b.k_stride, b.k_stride);
      if (shared) return;
      widen_rows(run.v, t.v_stride, run.count, t.head_dim_v, staged_v + first * b.v_stride, b.v_stride);
    });
  }
#if defined(__AVX512BF16__)
  if constexpr (Math::elements_per_word == 2) {
#if defined(TANDEM_MATRIX_UNIT)
    if constexpr (__is_same(K, bf16)) {
      stage_rows_in_tiles(t, layout, begin, count, b);
    } else {
      Block<Bf16Math> pairs;
      stage_converted_pairs<K>(t, layout, begin, count, pairs);
      stage_tiles(t, layout, count, pairs, b);
    }
#else
    Block<Bf16Math> pairs;
    if constexpr (__is_same(K, bf16)) {
      stage_pairs(t, layout, begin, count, pairs);
    } else {
      stage_converted_pairs<K>(t, layout, begin, count, pairs);
    }
    b.k = pairs.k;
    b.k_stride = pairs.k_stride;
    b.v = pairs.v;
    b.v_stride = pairs.v_stride;
#endif
  }
#endif
  return b;
}

}  // namespace tandem::cpu::TANDEM_TARGET
