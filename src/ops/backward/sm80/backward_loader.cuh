// The shared storage of the main backward kernel for sm_80 and later, and how its threads fill it.
#pragma once

#include "ops/backward/sm80/config.hpp"
#include "tile/backward_tiles.cuh"
#include "tile/copied_rows.cuh"

namespace tandem {

// ---- Shared storage ----

/// dO and dS (transposed: rows are keys), beside each other or in one place.
template <Sm80BackwardConfig C, bool in_one = C.ds_in_dout>
struct Sm80ScoreTiles {
  using DoutTile = tile::SharedTile<C.tiling.block_m, C.tiling.head_dim_v>;
  using ScoreTile = tile::SharedTile<C.tiling.block_n, C.tiling.block_m>;
  DoutTile dout[C.dout_stages];
  ScoreTile ds;
};
template <Sm80BackwardConfig C>
struct Sm80ScoreTiles<C, true> {
  using DoutTile = typename Sm80ScoreTiles<C, false>::DoutTile;
  using ScoreTile = typename Sm80ScoreTiles<C, false>::ScoreTile;
  union {
    DoutTile dout[C.dout_stages];
    ScoreTile ds;
  };
};

/// What warpgroups that halve the queries pass each other.
template <Sm80BackwardConfig C, bool halves = C.halves_queries()>
struct Sm80Exchanged {
  ptx::Vec4 exchanged[exchanged_bytes(C) / 16];
};
template <Sm80BackwardConfig C>
struct Sm80Exchanged<C, false> {};

template <Sm80BackwardConfig C>
struct Sm80BackwardShared : Sm80ScoreTiles<C>, Sm80Exchanged<C> {
  using KTile = tile::SharedTile<C.tiling.block_n, C.tiling.head_dim_qk>;
  using VTile = tile::SharedTile<C.tiling.block_n, C.tiling.head_dim_v>;
  using QTile = tile::SharedTile<C.tiling.block_m, C.tiling.head_dim_qk>;

  KTile k;  ///< and V: the tile's until it ends; there is no room for the next tile's before
  VTile v;
  QTile q[C.q_stages];
  float lse_log2[C.q_stages][C.tiling.block_m];
  float delta[C.dout_stages][C.tiling.block_m];
  float key_scale_log2[C.tiling.block_n];  ///< scale of each key's scores; NaN if the key is not finite
  u32 poisoned[C.consumers * 4];           ///< by warp: whether it has found a key that is not finite
  /// The tile that is computed, how far the scheduler has come with it, and the query heads of a KV head.
  /// Registers are for dK, dV and scores: what is needed of these is read again in each step.
  BackwardTile tile;
  typename BackwardTiles<C>::Progress progress;
  int group;
};

// ---- Visits ----

/// The visits of a tile: the query blocks that see it, of all query heads of its KV head. What is needed of
/// the tile is read from shared memory in each call.
template <Sm80BackwardConfig C>
struct Sm80Visits {
  const BackwardKernelParams<C>& p;
  Sm80BackwardShared<C>& shared;

  /// A visit of a head: a query block, or with lists its place in the head's list.
  struct Visit {
    int head;
    int visit;
  };
  TANDEM_DEVICE BackwardTile current() const { return ptx::load_shared(&shared.tile); }
  TANDEM_DEVICE int first_head() const {
    return ptx::load_shared(&shared.tile.head_kv) * ptx::load_shared(&shared.group);
  }
  TANDEM_DEVICE bool exists(Visit at) const {
    return at.head < first_head() + ptx::load_shared(&shared.group);
  }
  /// All lanes of a warp call, also of the next ones.
  TANDEM_DEVICE Visit first() const {
    if constexpr (C.functions.block_lists) return after({first_head(), -1});
    return {first_head(), ptx::load_shared(&shared.tile.blocks.first)};
  }
  TANDEM_DEVICE Visit after(Visit at) const {
    if constexpr (C.functions.block_lists) {  // which of a head may be empty
      Visit next{at.head, at.visit + 1};
      while (exists(next) && next.visit >= length_of(next.head)) next = {next.head + 1, 0};
      return next;
    }
    if (at.visit + 1 < ptx::load_shared(&shared.tile.blocks.end)) return {at.head, at.visit + 1};
    return {at.head + 1, ptx::load_shared(&shared.tile.blocks.first)};
  }
  TANDEM_DEVICE int block_of(Visit at) const {
    if constexpr (!C.functions.block_lists) return at.visit;
    const BackwardTile t = current();
    return QueryVisits<C, true>{p, t, at.head}.at(at.visit).block;
  }
  /// The number in the workspace of a visit's query block; all lanes of a warp call. (BackwardTile::q_block
  /// would be in local memory.)
  TANDEM_DEVICE i64 workspace_block_of(Visit at) const {
    const BackwardTile t = current();
    return workspace_block(p, at.head, first_query_block<C>(p, t.batch, t.begin_q) + block_of(at));
  }

 private:
  TANDEM_DEVICE int length_of(int head) const {
    const BackwardTile t = current();
    return QueryVisits<C, true>{p, t, head}.end();
  }
};

// ---- Loader ----

/// Starts the copies of a tile; all threads of the CTA call. Rows past a sequence's end, and queries that see
/// no key, become zeros.
template <Sm80BackwardConfig C>
struct Sm80BackwardLoader : Sm80Visits<C> {
  using Copier = tile::RowCopier<C.threads()>;
  using typename Sm80Visits<C>::Visit;
  using Sm80Visits<C>::p;
  using Sm80Visits<C>::shared;
  using Sm80Visits<C>::current;

  TANDEM_DEVICE Sm80BackwardLoader(const BackwardKernelParams<C>& params, Sm80BackwardShared<C>& s)
      : Sm80Visits<C>{params, s} {}

  TANDEM_DEVICE void load_keys() {
    const BackwardTile t = current();
    const int batch = p.packed_k ? 0 : t.batch;
    const auto first = [&](const void* data, const Strides& s) {
      return static_cast<const u16*>(data) + batch * s.batch + t.head_kv * s.head +
             (t.begin_k + static_cast<i64>(t.first_key)) * s.row;
    };
    const int rows = t.visible.seqlen_k - t.first_key;
    load(shared.k, first(p.k_data, p.k_stride), p.k_stride.row, 0, rows, p.head_dim_qk);
    load(shared.v, first(p.v_data, p.v_stride), p.v_stride.row, 0, rows, p.head_dim_v);
  }
  /// Q of a visit, if there is one, with its LSE; and its dO, with delta.
  TANDEM_DEVICE void load_q(Visit at, int stage) {
    load_visit(at, shared.q[stage], p.q_data, p.q_stride, p.head_dim_qk, shared.lse_log2[stage], p.lse_log2);
  }
  TANDEM_DEVICE void load_dout(Visit at, int stage) {
    load_visit(at, shared.dout[stage], p.dout, p.dout_stride, p.head_dim_v, shared.delta[stage], p.delta);
  }

 private:
  /// The queries of a visit, if there is one, from one of their tensors, and a number of each from the
  /// workspace.
  template <typename Tile>
  TANDEM_DEVICE void load_visit(Visit at, Tile& to, const void* data, const Strides& s, int columns,
                                float* numbers_to, const float* numbers) {
    if (!this->exists(at)) return;
    const BackwardTile t = current();
    const int first = this->block_of(at) * C.tiling.block_m;
    const u16* const rows = static_cast<const u16*>(data) + (p.packed_q ? 0 : t.batch) * s.batch +
                            at.head * s.head + (t.begin_q + static_cast<i64>(first)) * s.row;
    const int unseeing = C.mask.causal ? t.visible.first_seeing() - first : 0;
    load(to, rows, s.row, unseeing, t.visible.seqlen_q - first, columns);
    load_numbers(numbers_to, numbers, at);
  }
  /// Rows [first, end) of the tile exist.
  template <typename Tile>
  TANDEM_DEVICE void load(Tile& to, const u16* rows, i64 stride, int first, int end, int columns) {
    Copier::copy(to, columns, [&](int row, int column) {
      return tile::DenseRowsFromFirst(rows + column, row, stride, first, end);
    });
  }
  TANDEM_DEVICE void load_numbers(float* to, const float* from, Visit at) {
    const float* const block = from + this->workspace_block_of(at) * C.tiling.block_m;  // whole warps
    const int thread = static_cast<int>(ptx::thread_index_anew());
    if (thread >= C.tiling.block_m / 4) return;
    ptx::copy_async(reinterpret_cast<ptx::Vec4*>(to) + thread,
                    reinterpret_cast<const ptx::Vec4*>(block) + thread);
  }
};

}  // namespace tandem
