// Where the keys of a tile's sequence lie in k and v, and how a block of them is loaded. The loaders of all
// forward kernels use these functions and nothing else. In a dense batch and in a varlen one alike,
// consecutive keys are consecutive rows; in a cache they may be rows of pages.
#pragma once

#include "ops/forward/config.hpp"
#include "ptx/tma.cuh"
#include "tile/scheduler.cuh"

namespace tandem::tile {

/// The coordinates of key `key` of the sequence.
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
/// keys, nobody reads them again. `tiles`: that read them at once.
template <bool split, Tiling T, int tiles = 1>
TANDEM_DEVICE ptx::CacheHint hint_of(const ForwardParams& p, const TileIndex& t) {
  if constexpr (!split) return ptx::CacheHint::last;
  const bool all = t.end_q <= (T.heads_as_rows ? queries_of_tile<T>(p) : T.block_m);
  return all && (!T.heads_as_rows || tiles * p.row_heads >= p.group) ? ptx::CacheHint::first
                                                                     : ptx::CacheHint::last;
}

/// Starts loading the keys from `key` on of the tile's sequence, as many as `to` has rows, of KV head `head`.
template <KeySource keys = KeySource::rows, typename Tile>
TANDEM_DEVICE void load_keys(Tile& to, const TensorMap& map, ptx::Mbarrier& full, const ForwardParams& p,
                             const TileIndex& t, int key, int head, ptx::CacheHint hint) {
  to.load(map, full, key_row(t, key), head, key_batch<keys>(p, t), hint);
}
template <typename Tile>
TANDEM_DEVICE void load_keys(Tile& to, const TensorMap& map, ptx::Mbarrier& full, const ForwardParams& p,
                             const TileIndex& t, int key) {
  load_keys(to, map, full, p, t, key, key_head(p, t), ptx::CacheHint::last);
}

/// Divides by the rows of a page, which a warp does for each block of keys: a multiplication, whose result is
/// one too small at most, in place of the division's chain of conversions.
struct PageDivider {
  int page_size;
  u32 reciprocal;

  TANDEM_DEVICE explicit PageDivider(int rows)
      : page_size(rows), reciprocal(0xFFFFFFFFU / static_cast<u32>(rows)) {}
  /// Divides a number that is not negative.
  TANDEM_DEVICE int divide(int at) const {
    const int low = static_cast<int>(static_cast<u64>(static_cast<u32>(at)) * reciprocal >> 32);
    return at - low * page_size >= page_size ? low + 1 : low;
  }
};

/// A row of a page.
struct PagePlace {
  int page = -1;
  int row = 0;
};

/// Where row `row` of the block of keys that begins with `key` lies. Past the sequence's end no entry of the
/// table is read: such boxes lie outside the tensor, which TMA reads as zeros.
template <KeySource keys = KeySource::pages>
TANDEM_DEVICE PagePlace page_place(const ForwardParams& p, const TileIndex& t, const PageDivider& divider,
                                   int key, int row) {
  int at = key + row;
  int end = t.seqlen_k;
  if constexpr (keys == KeySource::padded_pages) {
    at += t.begin_k;
    end += t.begin_k;
  }
  const int number = divider.divide(at);
  return {at < end ? page_at(p.pages, t.batch, number) : -1, at - number * divider.page_size};
}

/// Starts loading keys from pages, box by box; all lanes of a warp call. `place`: of the lane's first box.
/// Behind padding boxes have one row, since a block of keys may then begin anywhere in a page.
template <KeySource keys = KeySource::pages, typename Tile>
TANDEM_DEVICE void load_pages(Tile& to, const TensorMap& map, ptx::Mbarrier& full, const ForwardParams& p,
                              const TileIndex& t, const PageDivider& divider, int key, int head, int lane,
                              PagePlace place, ptx::CacheHint hint) {
  const int box_rows = p.pages.box_rows;
  for (int row = lane * box_rows; row < Tile::row_count; row += warp_size * box_rows) {
    if (row >= warp_size * box_rows) place = page_place<keys>(p, t, divider, key, row);
    to.load_rows(row, map, full, place.row, head, place.page, hint);
  }
}

/// The scale of a tile's keys, where they have one.
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
