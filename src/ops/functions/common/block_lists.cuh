// Before the forward and the main backward kernel, where there is a mask function: lists the blocks of which
// a tile sees any pair, key blocks of a tile of queries, or query blocks of a tile of keys. Interval
// arithmetic says of most blocks that the function hides or shows all of their pairs; of the others it is
// evaluated for every pair. Lists serve all heads, or all batch entries, where the function does not depend
// on them.
#pragma once

#include "ops/backward/sm80/config.hpp"
#include "ops/forward/sm80/config.hpp"
#include "ptx/barrier.cuh"
#include "tile/functions.cuh"
#include "tile/walk.cuh"

namespace tandem {

/// What functions keep of queries, or of keys.
template <Functions F>
struct ListedQueries {
  using User = tile::UserFunctions<F.digest>;
  using Kept = typename User::Row;
  static constexpr bool queries = true;
  static constexpr int values = User::row_values;
  static TANDEM_DEVICE Kept make(const tile::FunctionSequence& sequence, int head, int query) {
    return User::row(sequence, head, query);
  }
  static TANDEM_DEVICE void write(const Kept& kept, i32* to) { User::write_row(kept, to); }
};
template <Functions F>
struct ListedKeys {
  using User = tile::UserFunctions<F.digest>;
  using Kept = typename User::Key;
  static constexpr bool queries = false;
  static constexpr int values = User::key_values;
  static TANDEM_DEVICE Kept make(const tile::FunctionSequence& sequence, int /*head*/, int key) {
    return User::key(sequence, key);
  }
  static TANDEM_DEVICE void write(const Kept& kept, i32* to) { User::write_key(kept, to); }
};

/// The ranges of what functions keep of `items` queries or keys from `first` on, up to `end`. All lanes of a
/// warp call and have the result.
template <typename Side, int items>
TANDEM_DEVICE void find_ranges(const tile::FunctionSequence& sequence, int head, int first, int end,
                               Interval (&ranges)[Side::values + 1]) {
  constexpr int n = Side::values;
  if constexpr (n > 0) {
    i32 low[n];
    i32 high[n];
#pragma unroll
    for (int i = 0; i < n; ++i) {
      low[i] = 0x7fffffff;
      high[i] = -0x7fffffff - 1;
    }
#pragma unroll
    for (int at = 0; at < items; at += warp_size) {
      const int item = first + at + static_cast<int>(ptx::thread_index()) % warp_size;
      if (item >= end || item >= first + items) continue;
      i32 values[n];
      Side::write(Side::make(sequence, head, item), values);
#pragma unroll
      for (int i = 0; i < n; ++i) {
        low[i] = min(low[i], values[i]);
        high[i] = max(high[i], values[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
#pragma unroll
      for (int lanes = warp_size / 2; lanes > 0; lanes /= 2) {
        low[i] = min(low[i], static_cast<i32>(ptx::shuffle_xor(static_cast<u32>(low[i]), lanes)));
        high[i] = max(high[i], static_cast<i32>(ptx::shuffle_xor(static_cast<u32>(high[i]), lanes)));
      }
      ranges[i] = {low[i], high[i]};
    }
  }
}

/// Where a tile's list is made from: the tile's first row (or key) and the end of them, how many there are of
/// the other side, and the blocks of those that causal and window leave.
struct ListedTile {
  tile::FunctionSequence sequence;
  int head;
  int first;
  int end;
  int others;
  int first_block;
  int end_block;
};

/// Makes the list of a tile of `items` queries or keys, as `Own` has them, out of blocks of `others` of the
/// other side. One CTA.
template <Functions F, typename Own, typename Other, int items, int others>
struct ListMaker {
  using User = tile::UserFunctions<F.digest>;
  static constexpr int warps = list_threads / warp_size;
  static constexpr int parts = list_threads / list_rows;  ///< threads that share an item's pairs
  static constexpr int part = (others + parts - 1) / parts;
  static constexpr u32 whole = 0, hidden = 1, partial = 2, undecided = 3;
  static_assert(items <= list_rows && list_rows % warp_size == 0);

  const ListedTile& t;
  const int thread = static_cast<int>(ptx::thread_index());
  const int lane = thread % warp_size;
  const int warp = thread / warp_size;
  u32* const states = reinterpret_cast<u32*>(ptx::dynamic_shared());
  u32* const seen = states + list_chunk;  ///< for each block a word for each warp

  TANDEM_DEVICE explicit ListMaker(const ListedTile& tile) : t(tile) {}

  /// By interval arithmetic: a warp looks at a block.
  TANDEM_DEVICE void decide(int base, int blocks) {
    Interval own[Own::values + 1];
    find_ranges<Own, items>(t.sequence, t.head, t.first, t.end, own);
    for (int b = warp; b < blocks; b += warps) {
      Interval other[Other::values + 1];
      find_ranges<Other, others>(t.sequence, t.head, (base + b) * others, t.others, other);
      Interval visible;
      if constexpr (Own::queries) {
        visible = User::bounds(t.sequence, own, other);
      } else {
        visible = User::bounds(t.sequence, other, own);
      }
      const u32 state = !visible.single() ? undecided : visible.low != 0 ? whole : hidden;
      if (lane == 0) ptx::store_shared(states + b, state);
    }
  }

  /// By evaluation, where nothing is known: all warps share a block's pairs.
  TANDEM_DEVICE void evaluate(int base, int blocks) {
    const int item = t.first + thread % list_rows;
    const bool used = thread % list_rows < items && item < t.end;
    const typename Own::Kept own = Own::make(t.sequence, t.head, item);
    for (int b = 0; b < blocks; ++b) {
      if (ptx::load_shared(states + b) != undecided) continue;
      const int first = (base + b) * others + thread / list_rows * part;
      const int end_block = min((base + b + 1) * others, t.others);
      const int end = used ? min(first + part, end_block) : first;
      bool some = false;
      bool all = true;
#pragma unroll 4
      for (int i = first; i < end; ++i) {
        bool sees;
        const typename Other::Kept other = Other::make(t.sequence, t.head, i);
        if constexpr (Own::queries) {
          sees = User::pair(t.sequence, own, other, 0.0F).visible;
        } else {
          sees = User::pair(t.sequence, other, own, 0.0F).visible;
        }
        some = some || sees;
        all = all && sees;
      }
      const u32 any_lane = ptx::ballot(some);
      const u32 no_lane = ptx::ballot(!all);
      if (lane == 0)
        ptx::store_shared(seen + b * warps + warp, (any_lane != 0 ? 1U : 0U) | (no_lane != 0 ? 2U : 0U));
    }
  }

  TANDEM_DEVICE u32 state_of(int b) const {
    const u32 state = ptx::load_shared(states + b);
    if (state != undecided) return state;
    u32 found = 0;
    for (int w = 0; w < warps; ++w) found |= ptx::load_shared(seen + b * warps + w);
    return (found & 1U) == 0 ? hidden : (found & 2U) == 0 ? whole : partial;
  }

  TANDEM_DEVICE void make(u32* list) {
    u32 count = 0;
    for (int base = t.first_block; base < t.end_block; base += list_chunk) {
      const int blocks = min(list_chunk, t.end_block - base);
      decide(base, blocks);
      ptx::sync_block();
      evaluate(base, blocks);
      ptx::sync_block();
      if (warp == 0) {
        for (int first = 0; first < blocks; first += warp_size) {
          const int b = first + lane;
          const u32 state = b < blocks ? state_of(b) : hidden;
          const u32 listed = ptx::ballot(state != hidden);
          const u32 before = ptx::count_bits(listed & ((1U << lane) - 1));
          if (state != hidden)
            ptx::store_global(list + 1 + count + before,
                              static_cast<u32>(base + b) * 2 + (state == whole ? 1U : 0U));
          count += ptx::count_bits(listed);
        }
      }
      ptx::sync_block();
    }
    if (thread == 0) ptx::store_global(list, count);
  }
};

/// Key blocks by tile of queries. One CTA for each list.
template <auto C>
TANDEM_KERNEL __launch_bounds__(list_threads, 1)
    list_blocks(const __grid_constant__ WithFunctions<ForwardMaskParams<C>> p) {
  const int number = static_cast<int>(ptx::block_index());
  tile::TileIndex t;
  t.m = number % p.m_blocks;
  t.head = number / p.m_blocks % p.functions.lists.heads;
  t.batch = number / p.m_blocks / p.functions.lists.heads;
  t.seqlen_q = p.rows_q;
  t.seqlen_k = p.rows_k;
  const int first = t.m * C.tiling.block_m;
  const tile::BlockRange range =
      tile::BlockRange::of<C.tiling.block_n>(tile::visible_of<C.mask>(p, t), first, first + C.tiling.block_m);
  const ListedTile tile{{&p.functions, t.batch, p.rows_q, p.rows_k},
                        t.head,
                        first,
                        min(first + C.tiling.block_m, p.rows_q),
                        p.rows_k,
                        range.first,
                        range.end};
  using Maker = ListMaker<C.functions, ListedQueries<C.functions>, ListedKeys<C.functions>, C.tiling.block_m,
                          C.tiling.block_n>;
  Maker(tile).make(tile::list_at(p.functions.lists, t.batch, t.head, t.m));
}

/// Query blocks by tile of keys. One CTA for each list.
template <auto C>
TANDEM_KERNEL __launch_bounds__(list_threads, 1)
    list_query_blocks(const __grid_constant__ WithFunctions<BackwardParams> p) {
  const int number = static_cast<int>(ptx::block_index());
  const int n = number % p.n_blocks;
  const int head = number / p.n_blocks % p.functions.lists.heads;
  const int batch = number / p.n_blocks / p.functions.lists.heads;
  const int first = n * C.tile_keys();
  const tile::Visibility visible{p.rows_q, p.rows_k,
                                 C.mask.local ? p.window_left : tile::Visibility::unbounded,
                                 C.mask.causal ? p.window_right : tile::Visibility::unbounded};
  const auto range = tile::QueryBlockRange::of<C.tiling.block_m>(visible, first, first + C.tile_keys());
  const ListedTile tile{{&p.functions, batch, p.rows_q, p.rows_k},
                        head,
                        first,
                        min(first + C.tile_keys(), p.rows_k),
                        p.rows_q,
                        range.first,
                        range.end};
  using Maker = ListMaker<C.functions, ListedKeys<C.functions>, ListedQueries<C.functions>, C.tile_keys(),
                          C.tiling.block_m>;
  Maker(tile).make(tile::list_at(p.functions.lists, batch, head, n));
}

}  // namespace tandem
