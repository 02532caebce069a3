// Where the keys of a tile's sequence lie in k and v, and how a block of them is loaded. The loaders of all
// forward kernels use these functions and nothing else. In a dense batch and in a varlen one alike,
// consecutive keys are consecutive rows; in a cache they may be rows of pages.
#pragma once

#include "kernels/config/forward.hpp"
#include "kernels/ptx/tma.cuh"
#include "kernels/tile/scheduler.cuh"

namespace tandem::tile {

/// The coordinates of key `key` of the sequence. They are three functions, not one that returns three
/// numbers: ptxas schedules the producer's loop differently if the numbers are found at one place.
TANDEM_DEVICE int key_row(const TileIndex& t, int key) {
  return t.begin_k + key;
}
TANDEM_DEVICE int key_head(const ForwardParams& p, const TileIndex& t) {
  return t.head / (p.heads_q / p.heads_kv);
}
template <KeySource keys = KeySource::rows>
TANDEM_DEVICE int key_batch(const ForwardParams& p, const TileIndex& t) {
  if constexpr (keys == KeySource::entries) return t.batch_k;
  return p.packed_k ? 0 : t.batch;
}

/// Entry `i` of sequence `batch` in the page table. What names no page is -1.
TANDEM_DEVICE int page_at(const PageTable& pages, int batch, int i) {
  const i64 at = batch * pages.batch_stride + i * pages.stride;
  i64 page = 0;
  if (pages.wide) {
    page = ptx::load_global(static_cast<const long long*>(pages.data) + at);
  } else {
    page = ptx::load_global(static_cast<const int*>(pages.data) + at);
  }
  return page >= 0 && page < pages.count ? static_cast<int>(page) : -1;
}

/// How long the L2 should keep keys: where one tile has all queries of a sequence, and all heads that share
/// keys, nobody reads them again.
template <bool split, Tiling T>
TANDEM_DEVICE ptx::CacheHint hint_of(const ForwardParams& p, const TileIndex& t) {
  if constexpr (!split) return ptx::CacheHint::last;
  const bool all = t.end_q <= (T.heads_as_rows ? queries_of_tile<T>(p) : T.block_m);
  return all && (!T.heads_as_rows || p.row_heads >= p.group) ? ptx::CacheHint::first : ptx::CacheHint::last;
}

/// Starts loading the keys from `key` on of the tile's sequence, as many as `to` has rows.
template <KeySource keys = KeySource::rows, typename Tile>
TANDEM_DEVICE void load_keys(Tile& to, const TensorMap& map, ptx::Mbarrier& full, const ForwardParams& p,
                             const TileIndex& t, int key, ptx::CacheHint hint = ptx::CacheHint::last) {
  to.load(map, full, key_row(t, key), key_head(p, t), key_batch<keys>(p, t), hint);
}

/// Entries of a sequence's page table in a warp's registers, one a lane. Blocks come from right to left, so
/// that a load of 32 entries serves those of many blocks: a look-up for each would be waited for before each
/// block's copies can start.
struct PageWindow {
  static constexpr int nothing = 0x40000000;
  int first = nothing;  ///< entry of lane 0
  int page = -1;

  TANDEM_DEVICE bool has(int number, int last) const { return number >= first && last < first + warp_size; }
  /// Entries [number, last], 32 at most, and those before them. Entries past `last` are not read.
  TANDEM_DEVICE void take(const PageTable& pages, int batch, int number, int last, int lane) {
    if (has(number, last)) return;
    first = max(last - (warp_size - 1), 0);
    page = first + lane <= last ? page_at(pages, batch, first + lane) : -1;
  }
};

/// The same from pages, box by box; all lanes of a warp call. Past the sequence's end no entry of the table
/// is read: such boxes lie outside the tensor, which TMA reads as zeros. Behind padding boxes have one row,
/// since a block of keys may then begin anywhere in a page.
template <KeySource keys = KeySource::pages, typename Tile>
TANDEM_DEVICE void load_pages(Tile& to, const TensorMap& map, ptx::Mbarrier& full, const ForwardParams& p,
                              const TileIndex& t, int key, int lane, ptx::CacheHint hint,
                              PageWindow& window) {
  const int box_rows = p.pages.box_rows;
  int begin = key;
  int end = t.seqlen_k;
  if constexpr (keys == KeySource::padded_pages) {
    begin += t.begin_k;
    end += t.begin_k;
  }
  const int lowest = begin / p.pages.page_size;
  const int highest = (min(begin + Tile::row_count, end) - 1) / p.pages.page_size;
  const bool fits = ptx::warp_uniform(highest - lowest < warp_size ? 1 : 0) != 0;
  if (fits) window.take(p.pages, t.batch, lowest, highest, lane);
  for (int from = 0; from < Tile::row_count; from += warp_size * box_rows) {
    const int row = from + lane * box_rows;
    const int at = begin + row;
    const int number = at / p.pages.page_size;
    int page = -1;
    if (fits) {
      page = static_cast<int>(
          ptx::shuffle(static_cast<u32>(window.page), (number - window.first) & (warp_size - 1)));
    } else if (row < Tile::row_count && at < end) {
      page = page_at(p.pages, t.batch, number);
    }
    if (row < Tile::row_count)
      to.load_rows(row, map, full, at - number * p.pages.page_size, key_head(p, t), at < end ? page : -1,
                   hint);
  }
}

/// The scale of a tile's keys, where they have one: a base of the consumer, since a local of its compute()
/// would change the machine code of Configs that do not read it.
template <bool used>
struct KeyScale {
  float key_scale = 1.0F;
};
template <>
struct KeyScale<false> {};

/// The scale of the tile's K or V, of 8 bits.
TANDEM_DEVICE float scale_of(const HeadScales& scales, const ForwardParams& p, const TileIndex& t) {
  if (scales.data == nullptr) return 1.0F;
  return ptx::load_global(scales.data + t.batch * scales.batch_stride + key_head(p, t) * scales.head_stride);
}

}  // namespace tandem::tile
