// Before the forward kernel, where there is a mask function: lists the key blocks of which a tile of queries
// sees any pair, by evaluating the function for every pair that the window leaves. Lists serve all heads, or
// all batch entries, where the function does not depend on them.
#pragma once

#include "kernels/config/forward.hpp"
#include "kernels/ptx/barrier.cuh"
#include "kernels/tile/functions.cuh"
#include "kernels/tile/walk.cuh"

namespace tandem {

/// One CTA for each list. A group of threads has a thread for each row of the tile and looks at a key block;
/// the groups look at neighbouring blocks at a time.
template <ForwardConfig C>
TANDEM_KERNEL __launch_bounds__(list_threads, 1)
    list_blocks(const __grid_constant__ WithFunctions<ForwardParams> p) {
  static_assert(C.tiling.block_m <= list_rows && list_rows % warp_size == 0);
  using User = tile::UserFunctions<C.functions.digest>;
  constexpr int groups = list_threads / list_rows;
  constexpr int warps = list_rows / warp_size;  ///< of a group
  auto* const seen = reinterpret_cast<u32*>(ptx::dynamic_shared());
  const int thread = static_cast<int>(ptx::thread_index());
  const int group = thread / list_rows;
  const int number = static_cast<int>(ptx::block_index());
  tile::TileIndex t;
  t.m = number % p.m_blocks;
  t.head = number / p.m_blocks % p.functions.lists.heads;
  t.batch = number / p.m_blocks / p.functions.lists.heads;
  t.seqlen_q = p.rows_q;
  t.seqlen_k = p.rows_k;
  const tile::Visibility visible = tile::visible_of<C.mask>(p, t);
  const tile::BlockRange range =
      tile::BlockRange::of<C.tiling.block_n>(visible, t.m * C.tiling.block_m, (t.m + 1) * C.tiling.block_m);
  const int row = thread % list_rows;
  const int query = t.m * C.tiling.block_m + row;
  const bool used = row < C.tiling.block_m && query < p.rows_q;
  const tile::FunctionSequence sequence{p.functions.tensors, t.batch, p.rows_q, p.rows_k};
  const typename User::Row of_row = User::row(sequence, t.head, query);
  u32* const list = tile::list_of(p.functions.lists, t);
  u32 count = 0;
  for (int base = range.first; base < range.end; base += groups) {
    const int first_key = (base + group) * C.tiling.block_n;
    const int end_key = used && base + group < range.end ? min(first_key + C.tiling.block_n, p.rows_k) : 0;
    bool some = false;
    bool all = true;
#pragma unroll 4
    for (int key = first_key; key < end_key; ++key) {
      const bool sees = User::pair(sequence, of_row, User::key(sequence, key), 0.0F).visible;
      some = some || sees;
      all = all && sees;
    }
    const u32 any_lane = ptx::ballot(some);
    const u32 no_lane = ptx::ballot(!all);
    if (thread % warp_size == 0)
      ptx::store_shared(seen + thread / warp_size, (any_lane != 0 ? 1U : 0U) | (no_lane != 0 ? 2U : 0U));
    ptx::sync_block();
    if (thread == 0) {
      for (int g = 0; g < min(groups, range.end - base); ++g) {
        u32 of_block = 0;
        for (int w = 0; w < warps; ++w) of_block |= ptx::load_shared(seen + g * warps + w);
        if ((of_block & 1) == 0) continue;
        ptx::store_global(list + 1 + count, static_cast<u32>(base + g) * 2 + (of_block & 2 ? 0U : 1U));
        ++count;
      }
    }
    ptx::sync_block();
  }
  if (thread == 0) ptx::store_global(list, count);
}

}  // namespace tandem
