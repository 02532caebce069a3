// The 8-bit backward kernel's shared storage, and the warp that loads. tile/backward_dq.cuh has those that
// add dQ to the sums in global memory.
#pragma once

#include "ops/eight_bit_backward/config.hpp"
#include "tile/backward_dq.cuh"
#include "tile/byte_tile.cuh"
#include "tile/pipeline.cuh"

namespace tandem {

// ---- Shared storage ----

template <EightBitBackwardConfig C>
struct EightBitBackwardShared {
  static constexpr int keys = C.tiling.block_n;
  static constexpr int queries = C.tiling.block_m;
  using KTile = tile::ByteTile<keys, C.tiling.head_dim_qk>;
  using VTile = tile::ByteTile<keys, C.tiling.head_dim_v>;
  using QTile = tile::ByteTile<queries, C.tiling.head_dim_qk>;
  using DoutTile = tile::ByteTile<queries, C.tiling.head_dim_v>;
  using KTransposed = tile::ByteTile<C.tiling.head_dim_qk, keys>;
  using QTransposed = tile::ByteTile<C.tiling.head_dim_qk, queries>;
  using DoutTransposed = tile::ByteTile<C.tiling.head_dim_v, queries>;
  using ScoreTile = tile::ByteTile<queries, keys>;
  static constexpr u32 row_bytes = queries * sizeof(float);

  KTile k;
  KTransposed k_t;
  VTile v;
  QTile q[C.q_stages];
  QTransposed q_t[C.q_stages];
  DoutTile dout[C.q_stages];
  DoutTransposed dout_t[C.q_stages];
  /// dS twice: the buffer that a warpgroup writes has been read by both.
  ScoreTile scores[2];
  alignas(128) float dq[C.consumers * C.dq_slice()];
  float lse_log2[C.q_stages][queries];
  float delta[C.q_stages][queries];
  ptx::Float4 q_scale[C.q_stages];   ///< the first of them
  ptx::Float4 of_tile[C.consumers];  ///< what the scales of K and V make of S, dP and dQ
  tile::Ring<1> keys_ring;           ///< a tile's K and V stay until it ends
  tile::Ring<C.q_stages> ring;       ///< Q and dO
};

// ---- Producer ----

template <EightBitBackwardConfig C>
struct EightBitBackwardLoader {
  using Shared = EightBitBackwardShared<C>;

  const EightBitBackwardParams& p;
  Shared& shared;
  tile::Ring<1>::Position keys_at;
  typename tile::Ring<C.q_stages>::Position at;

  TANDEM_DEVICE EightBitBackwardLoader(const EightBitBackwardParams& params, Shared& s)
      : p(params), shared(s) {}

  TANDEM_DEVICE void load_keys(const BackwardTile& t) {
    constexpr u32 bytes = Shared::KTile::bytes + Shared::KTransposed::bytes + Shared::VTile::bytes;
    ptx::Mbarrier& full = shared.keys_ring.acquire(keys_at, bytes);
    const int batch = p.packed_k ? 0 : t.batch;
    const int column = first_block(t.begin_k, t.batch, p.packed_k) * quant_block + t.first_key;
    shared.k.load(p.k, full, t.begin_k + t.first_key, t.head_kv, batch, ptx::CacheHint::first);
    shared.v.load(p.v, full, t.begin_k + t.first_key, t.head_kv, batch, ptx::CacheHint::first);
    shared.k_t.load(p.k_transposed, full, 0, t.head_kv, batch, ptx::CacheHint::first, column);
  }
  TANDEM_DEVICE void load_queries(const BackwardTile& t, int head, int m) {
    constexpr u32 bytes = Shared::QTile::bytes + Shared::QTransposed::bytes + Shared::DoutTile::bytes +
                          Shared::DoutTransposed::bytes + 2 * Shared::row_bytes + sizeof(ptx::Float4);
    ptx::Mbarrier& full = shared.ring.acquire(at, bytes);
    const i64 block = workspace_block(p, head, t.q_block + m);
    const int row = t.begin_q + m * C.tiling.block_m;
    const int column = (t.q_block + m) * C.tiling.block_m;
    const int batch = p.packed_q ? 0 : t.batch;
    shared.q[at.stage].load(p.q, full, row, head, batch, ptx::CacheHint::last);
    shared.dout[at.stage].load(p.dout_map, full, row, head, batch, ptx::CacheHint::last);
    shared.q_t[at.stage].load(p.q_transposed, full, 0, head, 0, ptx::CacheHint::last, column);
    shared.dout_t[at.stage].load(p.dout_transposed, full, 0, head, 0, ptx::CacheHint::last, column);
    ptx::bulk_load(shared.lse_log2[at.stage], p.lse_log2 + block * C.tiling.block_m, Shared::row_bytes, full);
    ptx::bulk_load(shared.delta[at.stage], p.delta + block * C.tiling.block_m, Shared::row_bytes, full);
    ptx::bulk_load(&shared.q_scale[at.stage], p.q_scales + 4 * block, sizeof(ptx::Float4), full);
    at.advance();
  }

  /// All lanes of one warp.
  TANDEM_DEVICE void run() {
    const bool leader = ptx::elect_one();
    const int group = p.heads_q / p.heads_kv;
    BackwardTiles<C> tiles(p);
    BackwardTile t;
    ptx::wait_for_previous_grid();
    while (tiles.next(t)) {
      // The convert kernel is announced with the second tile, as in the 16-bit kernel.
      if (leader && tiles.round > 1) ptx::launch_next_grid();
      if (!has_visits<C>(p, t)) continue;
      if (leader) {
        load_keys(t);
#pragma unroll 1
        for (int g = 0; g < group; ++g) {
#pragma unroll 1
          for (int m = t.blocks.first; m < t.blocks.end; ++m) {
            load_queries(t, t.head_kv * group + g, BackwardTiles<C>::passing(t, m));
          }
        }
      }
      keys_at.advance();
    }
    ptx::launch_next_grid();
  }
};

}  // namespace tandem
