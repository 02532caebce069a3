// Where the keys of a tile lie, and their scales: rows at even distances, pages of a cache, or chosen rows.
#pragma once

#include "cpu/forward/tile.hpp"
#include "cpu/simd/vec.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// Keys that follow one another at t.k_stride and t.v_stride.
template <typename T>
struct KeyRun {
  const T* k;
  const T* v;
  int count;
};

/// Rows of one page that follow one another; without pages there is one. Page -1: a row that lies in none.
struct RowRun {
  std::int64_t page;
  std::int64_t row;
  int count;
};

/// The rows of the keys from `key` on, as many of `count` as lie in its page.
TANDEM_INLINE RowRun row_run(const ForwardTile& t, std::int64_t key, int count) {
  const TilePages& pages = t.pages;
  if (pages.chosen != nullptr) {
    key = pages.chosen[key];
    count = 1;
  }
  if (pages.table == nullptr) return {0, key, count};
  const std::int64_t row = pages.first_row + key;
  const std::int64_t number = row / pages.page_size * pages.stride;
  const std::int64_t page = pages.wide ? static_cast<const std::int64_t*>(pages.table)[number]
                                       : static_cast<const std::int32_t*>(pages.table)[number];
  if (page < 0 || page >= pages.count) return {-1, 0, 1};
  const std::int64_t in_page = row % pages.page_size;
  const std::int64_t left = pages.page_size - in_page;
  return {page, in_page, left < count ? static_cast<int>(left) : count};
}

/// The row that is read where the page table names no page.
template <typename T>
TANDEM_INLINE const T* missing_row() {
  return reinterpret_cast<const T*>(zero_row);
}

/// The keys from `key` on, as many of `count` as lie in its page.
template <typename T>
TANDEM_INLINE KeyRun<T> key_run(const ForwardTile& t, std::int64_t key, int count) {
  const RowRun run = row_run(t, key, count);
  if (run.page < 0) return {missing_row<T>(), missing_row<T>(), run.count};
  return {static_cast<const T*>(t.k) + run.page * t.pages.k_stride + run.row * t.k_stride,
          static_cast<const T*>(t.v) + run.page * t.pages.v_stride + run.row * t.v_stride, run.count};
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

/// The scales by row of keys [key, key + count); there are some.
TANDEM_INLINE void gather_scales(const ForwardTile& t, const TileScales& scales, std::int64_t key, int count,
                                 float* to) {
  for (int first = 0; first < count;) {
    const RowRun run = row_run(t, key + first, count - first);
    if (run.page < 0) {
      to[first++] = 0.0F;
      continue;
    }
    const float* const from = scales.data + run.page * scales.page_stride + run.row * scales.row_stride;
    for (int j = 0; j < run.count; ++j) to[first + j] = from[j * scales.row_stride];
    first += run.count;
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
