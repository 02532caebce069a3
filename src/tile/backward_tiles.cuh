// The tiles of the backward pass: which keys a CTA owns, which query blocks it loops over, and where those
// lie in the workspace.
#pragma once

#include "ops/backward/sm80/config.hpp"
#include "tile/backward_order.cuh"
#include "tile/functions.cuh"
#include "tile/mask.cuh"
#include "tile/scheduler.cuh"
#include "tile/select.cuh"

namespace tandem {

/// What the main kernel is launched with.
template <auto C>
using BackwardFunctionParams =
    typename Select<C.functions.given(), WithFunctions<BackwardParams>, BackwardParams>::type;
template <auto C>
using BackwardFamilyParams =
    typename Select<C.family == Family::sm80, WithAddresses<BackwardFunctionParams<C>>,
                    BackwardFunctionParams<C>>::type;
template <auto C>
using BackwardKernelParams =
    typename Select<C.functions.captured_gradients, WithCapturedGradients<BackwardFamilyParams<C>>,
                    BackwardFamilyParams<C>>::type;

/// The first query block of a sequence in the workspace (see BackwardParams). `batch` may also be one of the
/// two additional sequences, of rows that belong to none, that VarlenBlocks counts.
template <auto C>
TANDEM_DEVICE int first_query_block(const BackwardParams& p, int batch, int begin_q) {
  if (!p.packed_q) return batch * p.m_blocks;
  return begin_q / C.tiling.block_m + (batch == p.batch + 1 ? 0 : batch + 1);
}
/// The number in the workspace of a head's query block.
TANDEM_DEVICE i64 workspace_block(const BackwardParams& p, int head, int block) {
  return static_cast<i64>(head) * p.q_blocks + block;
}

/// The semaphore that counts a KV head's tiles whose dQ has been added (by each warp that writes dQ).
TANDEM_DEVICE u32* tiles_added(const BackwardParams& p, int batch, int head_kv) {
  return p.tiles_added + batch * p.heads_kv + head_kv;
}

/// The tiles of this CTA, one after another, in the order of BackwardOrder.
template <auto C>
struct BackwardTiles : BackwardOrder<C> {
  using Order = BackwardOrder<C>;

  const BackwardParams& p;
  int round = 0;
  int all;  ///< tiles, where all sequences have one length; kept with the progress, where that is kept
  tile::VarlenBlocks varlen;

  TANDEM_DEVICE explicit BackwardTiles(const BackwardParams& params)
      : p(params), all(params.heads_kv * params.batch * params.n_blocks) {}

  /// How far it has come, for those who keep that elsewhere while they compute.
  struct Progress {
    int round;
    int all;
    tile::VarlenBlocks varlen;
  };
  TANDEM_DEVICE Progress progress() const { return {round, all, varlen}; }
  TANDEM_DEVICE void resume(const Progress& at) {
    round = at.round;
    all = at.all;
    varlen = at.varlen;
  }

  /// All lanes of a warp call.
  TANDEM_DEVICE bool next(BackwardTile& t) {
    if constexpr (!C.keeps_progress) all = p.heads_kv * p.batch * p.n_blocks;
    const int number =
        ptx::warp_uniform(Order::number_of(round++, static_cast<int>(ptx::block_index()) / C.cluster,
                                           Order::clusters(), p.n_blocks, all, p.pairs));
    int seqlen_q = p.rows_q;
    int seqlen_k = p.rows_k;
    if constexpr (C.mask.varlen) {
      tile::VarlenBlock b;
      const tile::VarlenSide keys{p.cu_seqlens_k, p.seqused_k, p.rows_k, p.batch, p.heads_kv, p.packed_k};
      if (!varlen.locate(keys, C.tile_keys(), number, b)) return false;
      t.n = Order::ith_tile(b.block, b.blocks);
      t.head_kv = b.head;
      t.batch = b.batch;
      t.begin_k = b.rows.begin;
      t.end_k = b.rows.end - b.rows.begin;
      seqlen_k = b.rows.used;
      const tile::SequenceRows q =
          tile::other_side({p.cu_seqlens_q, p.seqused_q, p.rows_q, p.batch, p.heads_q, p.packed_q}, b.batch);
      t.begin_q = q.begin;
      seqlen_q = q.used;
    } else {
      if (number >= all) return false;
      const auto at = Order::head_tile(number, p.n_blocks, all, Order::clusters(), p.pairs);
      t.n = at.n;
      t.batch = at.head / p.heads_kv;
      t.head_kv = at.head - t.batch * p.heads_kv;
      t.end_k = p.rows_k;
      Order::set_round(t, at.head, p.n_blocks, round - 1, Order::clusters());
    }
    ptx::sync_warp();
    uniform(t.n, t.head_kv, t.batch, t.begin_q, t.begin_k, t.end_k, seqlen_q, seqlen_k);
    t.q_block = first_query_block<C>(p, t.batch, t.begin_q);
    t.visible = {seqlen_q, seqlen_k, C.mask.local ? p.window_left : tile::Visibility::unbounded,
                 C.mask.causal ? p.window_right : tile::Visibility::unbounded};
    t.first_key = t.n * C.tile_keys() + Order::rank() * C.tiling.block_n;
    t.blocks = tile::QueryBlockRange::of<C.tiling.block_m>(t.visible, t.n * C.tile_keys(),
                                                           (t.n + 1) * C.tile_keys());
    uniform(t.blocks.first, t.blocks.end, t.blocks.inner_first, t.blocks.inner_end);
    if constexpr (C.schedule.staggered) t.start = Order::start_of(t);
    return true;
  }

  /// All lanes have the same values, but ptxas does not see it. With loop bounds that it takes for divergent,
  /// it serialises the products of every varlen causal Config (warning C7520).
  template <typename... Ints>
  static TANDEM_DEVICE void uniform(Ints&... values) {
    ((values = ptx::warp_uniform(values)), ...);
  }
};

/// A query block, and whether a list says that the mask function hides nothing of it.
struct QueryVisit {
  int block;
  bool whole;
};
/// The query blocks that a tile visits for one query head: visits [first, end), of all blocks that causal and
/// window leave, or of those on the tile's list. The list's address and length are made again for every
/// visit: kept, they take consumers 12 bytes of local memory (NVRTC 13.0). `uniform`: all lanes of a warp
/// call.
template <auto C, bool uniform = false>
struct QueryVisits {
  static constexpr bool lists = C.functions.block_lists;

  const BackwardKernelParams<C>& p;
  const BackwardTile& t;
  const int head;

  TANDEM_DEVICE int first() const { return lists ? 0 : t.blocks.first; }
  TANDEM_DEVICE int end() const {
    if constexpr (lists) return static_cast<int>(entry(0));
    return t.blocks.end;
  }
  TANDEM_DEVICE QueryVisit at(int visit) const {
    if constexpr (lists) {
      const u32 found = entry(1 + visit);
      return {static_cast<int>(found / 2), found % 2 != 0};
    }
    return {visit, true};
  }

 private:
  TANDEM_DEVICE u32 entry(int i) const {
    const u32* const at = tile::list_at(p.functions.lists, t.batch, head, t.n) + i;
    return uniform ? tile::uniform_entry(at) : ptx::load_global(at);
  }
};

/// A visit of a tile, as the loader and the dQ writers see it.
struct HeadVisit {
  int head;
  int block;   ///< the query block
  bool first;  ///< whether it is the tile's first
  bool next_is_told;
};
/// Calls act(visit, next) for each visit of a tile, in order. Where that is told, next() says how much
/// further in the workspace the query block of the next visit is.
template <auto C, typename Act>
TANDEM_DEVICE void for_visits(const BackwardKernelParams<C>& p, const BackwardTile& t, int group,
                              const Act& act) {
  if constexpr (C.schedule.turned) {
#pragma unroll 1
    for (int m = t.blocks.end - 1; m >= t.blocks.first; --m) {
      const int block = BackwardTiles<C>::turned(t, m);
#pragma unroll 1
      for (int g = 0; g < group; ++g) {
        const bool last_head = g + 1 == group;
        act(HeadVisit{t.head_kv * group + g, block, g == 0 && m == t.blocks.end - 1,
                      !last_head || m > t.blocks.first},
            [&] {
              if (!last_head) return p.q_blocks;
              return BackwardTiles<C>::turned(t, m - 1) - block - (group - 1) * p.q_blocks;
            });
      }
    }
    return;
  }
#pragma unroll 1
  for (int g = 0; g < group; ++g) {
    const QueryVisits<C> visits{p, t, t.head_kv * group + g};
    const int end = visits.end();
    const auto block_of = [&](int i) { return BackwardTiles<C>::passing(t, visits.at(i).block); };
#pragma unroll 1
    for (int i = visits.first(); i < end; ++i) {
      const int block = block_of(i);
      act(HeadVisit{t.head_kv * group + g, block, g == 0 && i == visits.first(), i + 1 < end},
          [&] { return (C.functions.block_lists && i + 1 == end ? block : block_of(i + 1)) - block; });
    }
  }
}

/// Whether the ping-pong of a tile goes on with that of the next one, if there is one. dQ of the first
/// warpgroup is two blocks late: behind a tile of one block it would need K of three tiles.
template <auto C>
TANDEM_DEVICE bool overlaps_next(const BackwardTile& t, int group) {
  return C.schedule.overlaps_tiles && group * (t.blocks.end - t.blocks.first) > 1;
}

/// Whether a tile has anything to do; one that has not loads nothing and takes no barrier. All lanes of a
/// warp call.
template <auto C>
TANDEM_DEVICE bool has_visits(const BackwardKernelParams<C>& p, const BackwardTile& t) {
  if constexpr (C.functions.block_lists) {
    const int group = p.heads_q / p.heads_kv;
    int visits = 0;
#pragma unroll 1
    for (int g = 0; g < group; ++g) visits |= QueryVisits<C>{p, t, t.head_kv * group + g}.end();
    return ptx::warp_uniform(visits) != 0;
  }
  return t.blocks.first < t.blocks.end;
}

}  // namespace tandem
