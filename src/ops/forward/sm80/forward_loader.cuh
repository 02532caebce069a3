// The shared storage of the forward kernel for sm_80 and later, and how its threads fill it.
#pragma once

#include "ops/forward/sm80/config.hpp"
#include "tile/copied_rows.cuh"
#include "tile/functions.cuh"
#include "tile/select.cuh"
#include "tile/visits.cuh"

namespace tandem {

/// What the kernel is launched with.
template <Sm80ForwardConfig C>
using Sm80KernelParams = WithValueAddress<
    typename Select<C.functions.given(), WithFunctions<ForwardMaskParams<C>>, ForwardMaskParams<C>>::type>;

// ---- Shared storage ----

template <Sm80ForwardConfig C>
struct Sm80ForwardShared {
  using QTile = tile::SharedTile<C.tiling.unit(), C.tiling.head_dim_qk>;
  using KTile = tile::SharedTile<C.tiling.block_n, C.tiling.head_dim_qk>;
  using VTile = tile::SharedTile<C.tiling.block_n, C.tiling.head_dim_v>;

  QTile q[C.units()];
  KTile k[C.stages];
  VTile v[C.stages];
  /// The tile that is computed. Registers are for O and S: what is needed of it is read again in each block.
  tile::QueryTile tile;
  const u16* k_origin;  ///< tile::key_origin of its keys
  const u16* v_origin;
};

// ---- Loader ----

/// Starts the copies of a tile in the order K, V, K, V, from the right block of keys to the left; all threads
/// of the CTA call. Every load is a group of copies, an empty one behind the last block, so that the number
/// of groups under way says what has come.
template <Sm80ForwardConfig C>
struct Sm80ForwardLoader {
  using Shared = Sm80ForwardShared<C>;
  using Copier = tile::RowCopier<C.threads()>;

  /// The groups behind the one that a wait is for: as many blocks ahead, a K and a V each.
  static constexpr int groups_ahead = 2 * (C.stages - 1);

  const Sm80KernelParams<C>& p;
  Shared& shared;

  /// Q and the first K and V of a tile, as many as there are buffers, but for the last V. Nobody reads any of
  /// them when it is called.
  TANDEM_DEVICE void begin(const tile::QueryTile& t) {
    const u16* const k = tile::key_origin<C.keys>(p, t.index, p.k_data, p.k_stride);
    const u16* const v = tile::key_origin<C.keys>(p, t.index, p.v_data, p.v_stride);
    if (ptx::thread_index() == 0) {
      ptx::store_shared(&shared.tile, t);
      ptx::store_shared(&shared.k_origin, k);
      ptx::store_shared(&shared.v_origin, v);
    }
#pragma unroll
    for (int unit = 0; unit < C.units(); ++unit) {
      Copier::copy(shared.q[unit], p.head_dim_qk, [&](int row, int column) {
        return [&, row, column](int offset) {
          return tile::query_row_at<C.tiling>(p, t.index, unit * C.tiling.unit() + row + offset, column);
        };
      });
    }
    const int visit = t.blocks.end - 1;
    load(shared.k[0], {p, t.index, k, p.k_stride}, t, visit, p.head_dim_qk);
#pragma unroll
    for (int i = 1; i < C.stages; ++i) {
      load(shared.v[i - 1], {p, t.index, v, p.v_stride}, t, visit - (i - 1), p.head_dim_v);
      load(shared.k[i], {p, t.index, k, p.k_stride}, t, visit - i, p.head_dim_qk);
    }
  }

  /// K of a visit, if it is one of the current tile's, to buffer `stage`, which all threads have read; the
  /// same of V.
  TANDEM_DEVICE void load_k(int visit, int stage) {
    const tile::QueryTile t = ptx::load_shared(&shared.tile);
    load(shared.k[stage], {p, t.index, ptx::load_shared(&shared.k_origin), p.k_stride}, t, visit,
         p.head_dim_qk);
  }
  TANDEM_DEVICE void load_v(int visit, int stage) {
    const tile::QueryTile t = ptx::load_shared(&shared.tile);
    load(shared.v[stage], {p, t.index, ptx::load_shared(&shared.v_origin), p.v_stride}, t, visit,
         p.head_dim_v);
  }
  template <typename Tile>
  TANDEM_DEVICE void load(Tile& to, const tile::KeyRows<C.keys>& rows, const tile::QueryTile& t, int visit,
                          int columns) {
    if (visit >= t.blocks.first) {
      const int block = tile::key_visit<C.functions>(p, t.index, visit).block;
      Copier::copy(to, columns,
                   [&](int row, int column) { return rows.from(block * C.tiling.block_n + row, column); });
    }
    ptx::commit_copies();
  }

  /// Waits for the oldest K or V that has not been waited for, in all threads: behind it they may read the
  /// tile, and they have read what was before it.
  TANDEM_DEVICE void wait() {
    ptx::wait_for_copy_groups<groups_ahead>();
    ptx::sync_block();
  }
};

}  // namespace tandem
