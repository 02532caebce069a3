// Where the keys of a tile lie: rows at even distances, or pages of a cache.
#pragma once

#include "cpu/forward_tile.hpp"
#include "cpu/simd/vec.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// Keys that follow one another at t.k_stride and t.v_stride.
template <typename T>
struct KeyRun {
  const T* k;
  const T* v;
  int count;
};

/// The keys from `key` on, as many of `count` as lie in its page.
template <typename T>
TANDEM_INLINE KeyRun<T> key_run(const ForwardTile& t, std::int64_t key, int count) {
  const T* const k = static_cast<const T*>(t.k);
  const T* const v = static_cast<const T*>(t.v);
  const TilePages& pages = t.pages;
  if (pages.table == nullptr) return {k + key * t.k_stride, v + key * t.v_stride, count};
  const std::int64_t row = pages.first_row + key;
  const std::int64_t number = row / pages.page_size * pages.stride;
  std::int64_t page = pages.wide ? static_cast<const std::int64_t*>(pages.table)[number]
                                 : static_cast<const std::int32_t*>(pages.table)[number];
  page = page < 0 ? 0 : (page < pages.count ? page : pages.count - 1);  // whatever is written there
  const std::int64_t in_page = row % pages.page_size;
  const std::int64_t left = pages.page_size - in_page;
  return {k + page * pages.k_stride + in_page * t.k_stride, v + page * pages.v_stride + in_page * t.v_stride,
          left < count ? static_cast<int>(left) : count};
}

/// Calls f(first, run) for the runs that keys [key, key + count) consist of; `first` counts from `key`.
template <typename T, typename Function>
TANDEM_INLINE void for_each_run(const ForwardTile& t, std::int64_t key, int count, Function f) {
  for (int first = 0; first < count;) {
    const KeyRun<T> run = key_run<T>(t, key + first, count - first);
    f(first, run);
    first += run.count;
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
