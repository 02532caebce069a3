// What host and device share of the kernel `combine`: its Config. It is launched with what the kernel with
// splits was.
#pragma once

#include "ops/forward/config.hpp"

namespace tandem {

/// CTAs of `decode` that together read keys at the memory's rate (an H200's). Keys of 8 bits take a CTA
/// longer to widen, pages to start a copy of each `box_rows` rows, 0 where keys are not in pages.
constexpr int ctas_at_full_rate_of(bool byte_keys, int box_rows) {
  constexpr int of_bytes = 186, of_pages = 132;
  constexpr int of_another_box = 13;  // of the 64 keys of a block
  const int widening = byte_keys ? of_bytes : ctas_at_full_rate;
  if (box_rows == 0) return widening;
  const int starting = of_pages + of_another_box * (box_rows < 64 ? 64 / box_rows - 1 : 0);
  return widening < starting ? starting : widening;
}

/// Everything that specialises the kernel `combine`. The tiling's head_dim_qk says nothing.
struct CombineConfig {
  Tiling tiling{};
  KeySource keys = KeySource::rows;
  bool invariant = false;  ///< as ForwardSchedule has it
  bool pairs = false;      ///< as LatentConfig has it

  constexpr bool operator==(const CombineConfig&) const = default;
  [[nodiscard]] constexpr int cluster() const { return pairs ? 2 : 1; }
};

/// What it needs of the Config of a kernel with splits.
constexpr CombineConfig combine_config(const auto& c) {
  CombineConfig combine{
      .tiling = c.tiling, .keys = c.keys, .invariant = c.schedule.invariant, .pairs = c.pairs};
  combine.tiling.head_dim_qk = c.tiling.head_dim_v;
  return combine;
}

/// Warps of a CTA of the kernel `combine`, and rows that it merges with a fixed split size, a warp each.
/// Without one all of its threads merge a row, and a tile has so many CTAs at most: a wide row takes long to
/// read.
constexpr int combine_rows = 4;
constexpr int combine_ctas(const Tiling& t) {
  return t.head_dim_v > 256 ? 64 : 16;
}

/// So many of its CTAs an SM holds, which leaves each so many registers: 80 fit beside `decode`.
constexpr int combine_ctas_per_sm(const CombineConfig& c) {
  return c.tiling.head_dim_v > 256 ? 4 : 6;
}

/// Groups of threads of `combine`, each of which adds up some of a row's partial results: a thread has four
/// columns, or with more than 128 some more.
constexpr int combine_groups(int head_dim_v) {
  return head_dim_v <= 32 ? 16 : head_dim_v <= 64 ? 8 : 4;
}
/// Without a split size: the weights of all partial results, two numbers of each warp, and each group's O.
constexpr int combine_shared_bytes(const CombineConfig& c) {
  if (c.invariant) return 0;
  return 4 * (combine_parts + 2 * combine_rows + combine_groups(c.tiling.head_dim_v) * c.tiling.head_dim_v);
}

}  // namespace tandem
