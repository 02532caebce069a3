// Rows that are fetched into the caches ahead of their use. They lie so far apart, heads between them, that
// the processor does not guess them, and they would be waited for one by one.
#pragma once

#include "cpu/forward/key_rows.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// Rows on their way into the second-level cache: K and V of the next block while one is computed, and out's
/// beside the last one, which are then `k`.
struct Ahead {
  const char* k = nullptr;
  const char* v = nullptr;
  std::int64_t k_stride = 0;  ///< bytes
  std::int64_t v_stride = 0;
  int k_bytes = 0;
  int v_bytes = 0;
  int rows = 0;
  int turns = 0;     ///< turns of fetch_share() that are left
  int per_tile = 0;  ///< turns for each register tile of scores

  /// Four lines of K and four of V a turn, so that all stripes of a tile share the fetching. The first stripe
  /// alone would ask for more than memory gives meanwhile, and its own misses would queue behind. Always
  /// inline: GCC takes a call for one without effect where nothing reads the Ahead behind it.
  [[gnu::always_inline]] void fetch_share() {
    for (int i = 0; i < per_tile && turns > 0; ++i, --turns) {
      for (const int end = k_at + turn_bytes; k_at < end; k_at += 64) {
        if (k_at < k_bytes) __builtin_prefetch(k + k_at, 0, 2);
      }
      for (const int end = v_at + turn_bytes; v_at < end; v_at += 64) {
        if (v_at < v_bytes) __builtin_prefetch(v + v_at, 0, 2);
      }
      if (k_at < k_bytes || v_at < v_bytes) continue;
      k_at = v_at = 0;
      k += k_stride;
      v += v_stride;
    }
  }

  /// Fetches all rows at once.
  [[gnu::always_inline]] void fetch() {
    share(1);
    fetch_share();
  }

  /// Spreads fetch_share() over `tiles` register tiles of scores.
  void share(int tiles) {
    const int most = k_bytes > v_bytes ? k_bytes : v_bytes;
    turns = rows * ((most + turn_bytes - 1) / turn_bytes);
    per_tile = (turns + tiles - 1) / tiles;
  }

 private:
  static constexpr int turn_bytes = 256;
  int k_at = 0;
  int v_at = 0;
};

/// Rows of K and V from `begin` on, as far as they are at even distances.
template <typename K>
TANDEM_INLINE Ahead rows_ahead(const ForwardTile& t, std::int64_t begin, int count) {
  const KeyRun<K> run = key_run<K>(t, begin, count);
  Ahead ahead;
  ahead.k = reinterpret_cast<const char*>(run.k);
  ahead.v = reinterpret_cast<const char*>(run.v);
  ahead.k_stride = t.k_stride * static_cast<std::int64_t>(sizeof(K));
  ahead.v_stride = t.v_stride * static_cast<std::int64_t>(sizeof(K));
  ahead.k_bytes = t.head_dim_qk * static_cast<int>(sizeof(K));
  ahead.v_bytes = t.head_dim_v * static_cast<int>(sizeof(K));
  ahead.rows = run.count;
  return ahead;
}

/// A tile's rows of out, which the last block of keys has time for; none if they are at uneven distances.
TANDEM_INLINE Ahead out_ahead(const ForwardTile& t) {
  Ahead ahead;
  if (t.group > 1 && t.out.row_stride != t.group * t.out.head_stride) return ahead;
  const int size = t.out_dtype == DType::f32 ? 4 : 2;
  const std::int64_t stride = t.group > 1 ? t.out.head_stride : t.out.row_stride;
  ahead.k_stride = stride * size;
  ahead.k_bytes = t.head_dim_v * size;
  ahead.k = static_cast<const char*>(t.out.data) +
            (t.first / t.group * t.out.row_stride + t.first % t.group * t.out.head_stride) * size;
  ahead.rows = t.count;
  return ahead;
}

/// Fetches `count` stacked rows of q or out, all at once.
template <typename T, bool written>
TANDEM_INLINE void fetch_rows(const ForwardTile& t, const GroupRows& rows, std::int64_t first, int count,
                              int columns) {
  for (std::int64_t x = first; x < first + count; ++x) {
    const auto* const begin = reinterpret_cast<const char*>(
        static_cast<const T*>(rows.data) + x / t.group * rows.row_stride + x % t.group * rows.head_stride);
    for (int at = 0; at < columns * static_cast<int>(sizeof(T)); at += 64) {
      __builtin_prefetch(begin + at, written ? 1 : 0);
    }
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
