// The producer of keys in small pages. TMA starts a box for each page and strip of 64 columns, one after
// another: 32 of them for 128 keys in pages of 16 rows. Here the four warps of the producer warpgroup copy
// rows by cp.async, 16 bytes a thread at a time, to where TMA would have put them. A warp has 4 rows of every
// 16, so that a block of 128 keys has one for each lane, whose place in its page the lane looks up a block
// ahead; the others learn it by shuffles.
#pragma once

#include "ops/forward/sm90/forward_producer.cuh"

namespace tandem {

/// A row of a page, by the entry of the page table as memory has it: it is looked at when its bytes have
/// come.
struct GatheredRow {
  u32 page = 0;
  u32 high = 0;  ///< upper half of a wide entry
  int row = -1;  ///< row of the page; below 0: no page has it

  /// Where the row begins, in bytes; below 0 if it does not exist.
  TANDEM_DEVICE i64 offset(const PageTable& pages, const Strides& stride) const {
    const bool exists = row >= 0 && high == 0 && page < static_cast<u32>(pages.count);
    return exists ? 2 * (page * stride.batch + row * stride.row) : -1;
  }
};

template <ForwardConfig C>
struct ForwardGatherer {
  using Shared = ForwardShared<C>;
  static constexpr int vectors = 8;                         ///< 16 bytes each, in a strip's row
  static constexpr int warp_rows = warp_size / vectors;     ///< that a warp copies at once
  static constexpr int pass = gathering_warps * warp_rows;  ///< rows that the warpgroup copies at once
  static_assert(C.tiling.block_n % pass == 0 && C.tiling.block_n <= gathering_warps * warp_size);

  const ForwardKernelParams<C>& p;
  Shared& shared;
  const int warp;
  typename tile::Ring<C.stages>::Position at;  ///< place of the next V; the next K's, or one before it
  typename tile::Ring<C.q_stages>::Position q_at;
  ForwardTiles<C> tiles;
  tile::QueryTile t;
  int kv_head = 0;
  const tile::PageDivider divider;

  TANDEM_DEVICE ForwardGatherer(const ForwardKernelParams<C>& params, Shared& s, int warp_)
      : p(params), shared(s), warp(warp_), tiles(params, s.tiles), divider(params.pages.page_size) {}

  /// Read again where it is needed: a register more would be kept in local memory.
  static TANDEM_DEVICE int lane_anew() { return static_cast<int>(ptx::lane_index_anew()); }
  /// The first of the warp's rows in a pass.
  TANDEM_DEVICE int first_row() const { return warp * warp_rows; }

  /// Looks up the lane's row of a block: that which lanes of its group of `vectors` copy in pass lane %
  /// vectors.
  TANDEM_DEVICE GatheredRow look_up(int block) const {
    const int lane = lane_anew();
    const int row = lane % vectors * pass + first_row() + lane / vectors;
    const int key = block * C.tiling.block_n + row;
    if (key >= t.index.seqlen_k) return {};
    const PageTable& pages = p.pages;
    const int number = divider.divide(key);
    const i64 place = t.index.batch * pages.batch_stride + number * pages.stride;
    const u32* const entry = static_cast<const u32*>(pages.data) + (pages.wide ? 2 * place : place);
    GatheredRow found{.row = key - number * divider.page_size};
    found.page = ptx::load_global(entry);
    if (pages.wide) found.high = ptx::load_global(entry + 1);
    return found;
  }

  /// Starts copying the warp's rows of a tile of K or V. `offset`: of the lane's row, of those that begin at
  /// `data`, which have `columns` columns.
  template <typename Tile>
  TANDEM_DEVICE void copy(Tile& to, const void* data, const Strides& stride, int columns, i64 offset) {
    static_assert(Tile::strip_cols == 8 * vectors);
    const int lane = lane_anew();
    const int row = first_row() + lane / vectors;
    const int column = lane % vectors * 8;
    char* const target = to.address(row, column);
    const char* const from = static_cast<const char*>(data) + 2 * (kv_head * stride.head) + 2 * column;
    const auto low = static_cast<u32>(offset);
    const auto high = static_cast<u32>(offset >> 32);
#pragma unroll
    for (int i = 0; i < C.tiling.block_n / pass; ++i) {
      const u64 of_row = static_cast<u64>(ptx::shuffle_within<vectors>(high, i)) << 32 |
                         ptx::shuffle_within<vectors>(low, i);
      const bool exists = static_cast<i64>(of_row) >= 0;
#pragma unroll
      for (int s = 0; s < Tile::strips; ++s) {
        ptx::copy_async_or_zero(
            reinterpret_cast<ptx::Vec4*>(target + i * pass * Tile::row_bytes + s * Tile::strip_bytes),
            reinterpret_cast<const ptx::Vec4*>(from + static_cast<i64>(of_row) + s * Tile::row_bytes),
            exists && column < columns - s * Tile::strip_cols);
      }
    }
  }

  /// What the thread has copied is there but for the last `pending` groups. It is fenced for the tensor
  /// cores, which read it by another way, before the warp says so.
  template <int pending, typename Ring, typename Position>
  static TANDEM_DEVICE void hand_over(Ring& ring, const Position& at) {
    ptx::wait_for_copy_groups<pending>();
    ptx::fence_async_shared();
    ptx::sync_warp();
    if (lane_anew() == 0) ring.hand_over(at);
  }

  /// The first warp loads Q.
  TANDEM_DEVICE void load_q() {
    if (warp == 0 && lane_anew() == 0) {
      const int row = t.index.begin_q + tile::first_query<C.tiling>(p, t.index.m, 0);
      for (int w = 0; w < C.consumers(); ++w) {
        ptx::Mbarrier& full =
            shared.q_ring[w].acquire(q_at, tile::queries_bytes<C.tiling, typename Shared::QTile>(p));
        tile::load_queries<C.tiling>(shared.q[w][q_at.stage], full, p, t.index,
                                     row + w * tile::queries_of_unit<C.tiling>(p));
      }
    }
    ptx::sync_warp();
    q_at.advance();
  }

  /// Starts copying K of the block whose rows are `from`, and looks up the rows of block `next`. Returns
  /// where the row of V begins.
  template <typename Position>
  TANDEM_DEVICE i64 copy_k(const Position& to, GatheredRow& from, int next) {
    const i64 offset = from.offset(p.pages, p.k_stride);
    const i64 v_offset = from.offset(p.pages, p.v_stride);
    shared.k_ring.wait_free(to);
    copy(shared.k[to.stage], p.k_data, p.k_stride, p.head_dim_qk, offset);
    ptx::commit_copies();
    if (next >= t.blocks.first) from = look_up(next);
    return v_offset;
  }

  /// In the order in which the consumers need them: K one block ahead of V. Q follows the first K, whose
  /// place is free earlier.
  TANDEM_DEVICE void load_tile() {
    int block = t.blocks.end - 1;
    GatheredRow next = look_up(block);
    i64 v_offset = copy_k(at, next, block - 1);
    load_q();
    hand_over<0>(shared.k_ring, at);
    for (; block >= t.blocks.first; --block) {
      const bool more = block > t.blocks.first;
      auto ahead = at;
      ahead.advance();
      const i64 next_v_offset = more ? copy_k(ahead, next, block - 2) : -1;
      shared.v_ring.wait_free(at);
      copy(shared.v[at.stage], p.v_data, p.v_stride, p.head_dim_v, v_offset);
      ptx::commit_copies();
      if (more) hand_over<1>(shared.k_ring, ahead);
      hand_over<0>(shared.v_ring, at);
      v_offset = next_v_offset;
      at = ahead;
    }
  }

  /// The first warp takes the tiles.
  TANDEM_DEVICE bool find() {
    const bool leader = lane_anew() == 0;
    return warp == 0 ? tiles.template next<true>(t, leader) : tiles.template next<false>(t, leader);
  }
  TANDEM_DEVICE void run() {
    while (find()) {
      if (t.blocks.first >= t.blocks.end) continue;
      kv_head = tile::key_head(p, t.index);
      load_tile();
    }
  }
};

}  // namespace tandem
