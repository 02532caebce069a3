// Rows that are fetched into the caches ahead of their use. They lie so far apart, heads between them, that
// the processor does not guess them, and they would be waited for one by one.
#pragma once

#include "cpu/forward/key_rows.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// Rows of a block on their way into the second-level cache: of the next one while this one is computed, a
/// row of K and a row of V for every key scored.
struct Ahead {
  const char* k = nullptr;
  const char* v = nullptr;
  std::int64_t k_stride = 0;  ///< bytes
  std::int64_t v_stride = 0;
  int k_bytes = 0;
  int v_bytes = 0;
  int rows = 0;

  /// Always inline: GCC takes a call for one without effect where nothing reads the Ahead behind it.
  [[gnu::always_inline]] void fetch(int count) {
    for (; count > 0 && rows > 0; --count, --rows) {
      for (int i = 0; i < k_bytes; i += 64) __builtin_prefetch(k + i, 0, 2);
      for (int i = 0; i < v_bytes; i += 64) __builtin_prefetch(v + i, 0, 2);
      k += k_stride;
      v += v_stride;
    }
  }
};

/// Rows of K and V from `begin` on, as far as they are at even distances.
template <typename K>
TANDEM_INLINE Ahead rows_ahead(const ForwardTile& t, std::int64_t begin, int count) {
  const KeyRun<K> run = key_run<K>(t, begin, count);
  return {.k = reinterpret_cast<const char*>(run.k),
          .v = reinterpret_cast<const char*>(run.v),
          .k_stride = t.k_stride * static_cast<std::int64_t>(sizeof(K)),
          .v_stride = t.v_stride * static_cast<std::int64_t>(sizeof(K)),
          .k_bytes = t.head_dim_qk * static_cast<int>(sizeof(K)),
          .v_bytes = t.head_dim_v * static_cast<int>(sizeof(K)),
          .rows = run.count};
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
