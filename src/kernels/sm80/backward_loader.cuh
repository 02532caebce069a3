// The shared storage of the main backward kernel for sm_80 and later, and how its threads fill it.
#pragma once

#include "kernels/config/backward.hpp"
#include "kernels/tile/backward_tiles.cuh"
#include "kernels/tile/copied_rows.cuh"

namespace tandem {

// ---- Shared storage ----

/// dO and dS (transposed: rows are keys), beside each other or in one place.
template <BackwardConfig C, bool in_one = C.ds_in_dout>
struct Sm80ScoreTiles {
  using DoutTile = tile::SharedTile<C.tiling.block_m, C.tiling.head_dim_v>;
  using ScoreTile = tile::SharedTile<C.tiling.block_n, C.tiling.block_m>;
  DoutTile dout[C.dout_stages];
  ScoreTile ds;
};
template <BackwardConfig C>
struct Sm80ScoreTiles<C, true> {
  using DoutTile = typename Sm80ScoreTiles<C, false>::DoutTile;
  using ScoreTile = typename Sm80ScoreTiles<C, false>::ScoreTile;
  union {
    DoutTile dout[C.dout_stages];
    ScoreTile ds;
  };
};

/// What warpgroups that halve the queries pass each other.
template <BackwardConfig C, bool halves = C.halves_queries()>
struct Sm80Exchanged {
  ptx::Vec4 exchanged[exchanged_bytes(C) / 16];
};
template <BackwardConfig C>
struct Sm80Exchanged<C, false> {};

template <BackwardConfig C>
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
  /// The tile that is computed. Registers are for dK, dV and scores: what is needed of it is read again in
  /// each step.
  BackwardTile tile;
};

// ---- Loader ----

/// Starts the copies of a tile; all threads of the CTA call. Rows past a sequence's end, and queries that see
/// no key, become zeros.
template <BackwardConfig C>
struct Sm80BackwardLoader {
  using Shared = Sm80BackwardShared<C>;
  using Copier = tile::RowCopier<C.threads()>;

  const BackwardKernelParams<C>& p;
  Shared& shared;

  TANDEM_DEVICE void load_keys(const BackwardTile& t) {
    const int batch = p.packed_k ? 0 : t.batch;
    const auto first = [&](const void* data, const Strides& s) {
      return static_cast<const u16*>(data) + batch * s.batch + t.head_kv * s.head +
             (t.begin_k + static_cast<i64>(t.first_key)) * s.row;
    };
    const int rows = t.visible.seqlen_k - t.first_key;
    load(shared.k, first(p.k_data, p.k_stride), p.k_stride.row, 0, rows, p.head_dim_qk);
    load(shared.v, first(p.v_data, p.v_stride), p.v_stride.row, 0, rows, p.head_dim_v);
  }
  /// Query block m of a head, with its LSE; and its dO, with delta.
  TANDEM_DEVICE void load_q(const BackwardTile& t, int head, int m, int stage) {
    load_queries(shared.q[stage], p.q_data, p.q_stride, t, head, m, p.head_dim_qk);
    load_numbers(shared.lse_log2[stage], p.lse_log2, t, head, m);
  }
  TANDEM_DEVICE void load_dout(const BackwardTile& t, int head, int m, int stage) {
    load_queries(shared.dout[stage], p.dout, p.dout_stride, t, head, m, p.head_dim_v);
    load_numbers(shared.delta[stage], p.delta, t, head, m);
  }

 private:
  template <typename Tile>
  TANDEM_DEVICE void load_queries(Tile& to, const void* data, const Strides& s, const BackwardTile& t,
                                  int head, int m, int columns) {
    const int first = m * C.tiling.block_m;
    const u16* const rows = static_cast<const u16*>(data) + (p.packed_q ? 0 : t.batch) * s.batch +
                            head * s.head + (t.begin_q + static_cast<i64>(first)) * s.row;
    const int unseeing = C.mask.causal ? t.visible.first_seeing() - first : 0;
    load(to, rows, s.row, unseeing, t.visible.seqlen_q - first, columns);
  }
  /// Rows [first, end) of the tile exist.
  template <typename Tile>
  TANDEM_DEVICE void load(Tile& to, const u16* rows, i64 stride, int first, int end, int columns) {
    Copier::copy(to, columns, [&](int row, int offset) {
      return tile::SourceRow{rows + (row + offset) * stride, row + offset >= first && row + offset < end};
    });
  }
  TANDEM_DEVICE void load_numbers(float* to, const float* from, const BackwardTile& t, int head, int m) {
    const int thread = static_cast<int>(ptx::thread_index_anew());
    if (thread >= C.tiling.block_m / 4) return;
    const float* const block = from + workspace_block(p, head, t.q_block + m) * C.tiling.block_m;
    ptx::copy_async(reinterpret_cast<ptx::Vec4*>(to) + thread,
                    reinterpret_cast<const ptx::Vec4*>(block) + thread);
  }
};

}  // namespace tandem
