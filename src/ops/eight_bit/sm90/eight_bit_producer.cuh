// The 8-bit forward kernel's shared storage, and the producer warp that fills it with values and scales.
#pragma once

#include "ops/eight_bit/config.hpp"
#include "ptx/barrier.cuh"
#include "ptx/eight_bit.cuh"
#include "tile/byte_tile.cuh"
#include "tile/keys.cuh"
#include "tile/pipeline.cuh"
#include "tile/select.cuh"
#include "tile/shared_tile.cuh"
#include "tile/walk.cuh"

namespace tandem {

// ---- Shared storage ----

/// Scales by row of the tiles in flight; empty if scales are by block.
template <int stages, bool used>
struct StagedScales {
  static constexpr u32 bytes = 4 * quant_block;
  alignas(128) float data[stages][quant_block];

  TANDEM_DEVICE void load(int stage, const float* from, ptx::Mbarrier& bar) {
    ptx::bulk_load(data[stage], from, bytes, bar);
  }
};
template <int stages>
struct StagedScales<stages, false> {
  static constexpr u32 bytes = 0;
};

/// Strips of V of each warp that transposes them: as the caller has them, and with keys contiguous.
template <bool used>
struct ValueStrips {
  tile::ByteTile<quant_block, value_strip_columns> rows[transposing_warps];
  tile::ByteTile<value_strip_columns, quant_block> columns[transposing_warps];
};
template <>
struct ValueStrips<false> {};
/// Complete when `rows` have come.
template <bool used>
struct ValueStripBarriers {
  ptx::Mbarrier full[transposing_warps];
};
template <>
struct ValueStripBarriers<false> {};

/// Scales by block of a K tile in flight and of the V tile of the same keys.
struct BlockScales {
  float k;
  float v;
};

template <EightBitConfig C>
struct EightBitShared {
  using QTile = tile::ByteTile<64, C.tiling.head_dim_qk>;
  using KTile = tile::ByteTile<quant_block, C.tiling.head_dim_qk>;
  using VTile = tile::ByteTile<C.tiling.head_dim_v, quant_block>;

  QTile q[C.consumers()][C.q_stages];
  KTile k[C.stages];
  VTile v[C.stages];
  [[no_unique_address]] ValueStrips<C.in_place> strips;
  [[no_unique_address]] StagedScales<C.stages, C.row_scales> k_scales;
  [[no_unique_address]] StagedScales<C.stages, C.v_row_scales> v_scales;
  BlockScales block_scales[C.stages];  ///< by buffer of K
  tile::Ring<C.stages> k_ring;
  tile::Ring<C.stages> v_ring;
  tile::Ring<C.q_stages> q_ring[C.consumers()];
  [[no_unique_address]] ValueStripBarriers<C.in_place> strip_barriers;
  tile::DynamicScheduler::Shared tiles;
};

/// The scales of one head of one sequence.
TANDEM_DEVICE const float* scales_of(const ScaleArray& scales, int batch, int head) {
  return scales.data + batch * scales.stride.batch + head * scales.stride.head;
}
/// Scale number `group` of a head; 1 if the caller has left the scales out.
template <EightBitConfig C>
TANDEM_DEVICE float load_scale(const ScaleArray& scales, int batch, int head, i64 group) {
  if (C.in_place && scales.data == nullptr) return 1.0F;
  return ptx::load_global(scales_of(scales, batch, head) + group * scales.stride.group);
}

/// What the kernel is launched with.
template <EightBitConfig C>
using EightBitKernelParams =
    typename Select<C.tiling.max_logits, EightBitParamsWithMaxima, EightBitParams>::type;

// ---- V in place ----

/// The number of a block of V among those that are transposed.
TANDEM_DEVICE int value_block(const auto& p, int batch, int head, int begin_k, int b) {
  const int entry = p.forward.packed_k ? 0 : batch;
  return (entry * p.forward.heads_kv + head) * p.transposed.axis_blocks +
         first_block(begin_k, batch, p.forward.packed_k) + b;
}
/// The blocks of a sequence's keys that any of its queries sees: those that are transposed.
template <EightBitConfig C>
TANDEM_DEVICE tile::BlockRange value_blocks(const auto& p, const tile::TileIndex& t) {
  return tile::BlockRange::of<quant_block>(tile::visible_of<C.mask>(p.forward, t), 0, t.seqlen_q);
}

// ---- Producer ----

/// As ForwardLoader: blocks go right to left, K one block ahead of V. In order they come as they are wanted:
/// V behind its own K. A buffer of V is free before the next block's K is, so that the loads are spread.
template <EightBitConfig C>
struct EightBitLoader {
  using Shared = EightBitShared<C>;

  const EightBitKernelParams<C>& p;
  Shared& shared;
  const bool leader;
  typename tile::Ring<C.stages>::Position k_at, v_at;
  typename tile::Ring<C.q_stages>::Position q_at;
  tile::QueryTiles<C.tiling, C.mask, C.schedule.dynamic, KeySource::rows, C.by_number()> tiles;
  tile::QueryTile t;
  bool head_is_transposed = false;  ///< all of the tile's V

  TANDEM_DEVICE EightBitLoader(const EightBitKernelParams<C>& params, Shared& s)
      : p(params), shared(s), leader(ptx::elect_one()), tiles(params.forward, s.tiles) {}

  /// The number of block b on the axis of K's and V's blocks.
  TANDEM_DEVICE int block_at(int b) const {
    return first_block(t.index.begin_k, t.index.batch, p.forward.packed_k) + b;
  }
  TANDEM_DEVICE const float* row_scales(const ScaleArray& scales, int b) const {
    return scales_of(scales, tile::key_batch(p.forward, t.index), tile::key_head(p.forward, t.index)) +
           static_cast<i64>(block_at(b)) * quant_block;
  }

  /// The scales of block b; 1 where scales are by row.
  TANDEM_DEVICE BlockScales block_scales(int b) const {
    BlockScales scales{1.0F, 1.0F};
    // Caller-supplied scales count blocks from each sequence's beginning (all sequences have one length).
    const auto load = [&](const ScaleArray& from) {
      const int batch = C.in_place ? t.index.batch : tile::key_batch(p.forward, t.index);
      return load_scale<C>(from, batch, tile::key_head(p.forward, t.index), C.in_place ? b : block_at(b));
    };
    if constexpr (!C.row_scales) scales.k = load(p.k_scales);
    if constexpr (!C.v_row_scales) scales.v = load(p.v_scales);
    return scales;
  }
  TANDEM_DEVICE void load_k(int b) {
    BlockScales scales = block_scales(b);
    if constexpr (C.in_place) scales.v = ptx::max_magnitude(0.0F, scales.v);  // the values take its sign
    shared.k_ring.wait_free(k_at);
    ptx::store_shared(&shared.block_scales[k_at.stage].k, scales.k);
    ptx::store_shared(&shared.block_scales[k_at.stage].v, scales.v);
    ptx::Mbarrier& full =
        shared.k_ring.announce(k_at, Shared::KTile::bytes + decltype(shared.k_scales)::bytes);
    tile::load_keys(shared.k[k_at.stage], p.forward.k, full, p.forward, t.index, b * quant_block);
    if constexpr (C.row_scales) shared.k_scales.load(k_at.stage, row_scales(p.k_scales, b), full);
    k_at.advance();
  }
  /// Waits until block b, `number` of all, is transposed. That waits for no CTA that has yet to begin: strips
  /// are claimed one by one, and what nobody has claimed the warps of this CTA will. From the second block on
  /// a look at the whole head may spare those at its blocks.
  TANDEM_DEVICE void wait_transposed(int number, int b) {
    if (head_is_transposed) return;
    if (b + 2 == t.blocks.end) {
      const tile::BlockRange all = value_blocks<C>(p, t.index);
      const int head = t.index.batch * p.forward.heads_kv + tile::key_head(p.forward, t.index);
      head_is_transposed = ptx::semaphore_read(p.transposed.heads + head) ==
                           static_cast<u32>((all.end - all.first) * value_strips(C.tiling.head_dim_v));
    }
    if (!head_is_transposed) {
      ptx::semaphore_wait(p.transposed.blocks + number, static_cast<u32>(value_strips(C.tiling.head_dim_v)));
    }
    ptx::fence_async_global();
  }
  TANDEM_DEVICE void load_transposed_v(int b) {
    const int number = value_block(p, t.index.batch, tile::key_head(p.forward, t.index), t.index.begin_k, b);
    wait_transposed(number, b);
    ptx::Mbarrier& full = shared.v_ring.acquire(v_at, Shared::VTile::bytes);
    ptx::bulk_load(shared.v[v_at.stage].data,
                   p.transposed.data + static_cast<i64>(number) * Shared::VTile::bytes, Shared::VTile::bytes,
                   full);
    v_at.advance();
  }
  TANDEM_DEVICE void load_v(int b) {
    ptx::Mbarrier& full =
        shared.v_ring.acquire(v_at, Shared::VTile::bytes + decltype(shared.v_scales)::bytes);
    const int key = block_at(b) * quant_block;  // keys are columns
    shared.v[v_at.stage].load(p.forward.v, full, 0, tile::key_head(p.forward, t.index),
                              tile::key_batch(p.forward, t.index), ptx::CacheHint::last, key);
    if constexpr (C.v_row_scales) shared.v_scales.load(v_at.stage, row_scales(p.v_scales, b), full);
    v_at.advance();
  }
  /// Loads Q; the first K follows Q of the first warpgroup.
  TANDEM_DEVICE void load_q() {
    const int row = t.index.begin_q + t.index.m * C.tiling.block_m;
    for (int w = 0; w < C.consumers(); ++w) {
      ptx::Mbarrier& full = shared.q_ring[w].acquire(q_at, Shared::QTile::bytes);
      shared.q[w][q_at.stage].load(p.forward.q, full, row + w * 64, t.index.head,
                                   p.forward.packed_q ? 0 : t.index.batch, ptx::CacheHint::first);
      if (w == 0) load_k(t.blocks.end - 1);
    }
    q_at.advance();
  }

  TANDEM_DEVICE void run() {
    while (tiles.template next<true>(t, leader)) {
      if (!leader || t.blocks.first >= t.blocks.end) continue;
      load_q();
      head_is_transposed = false;
      for (int b = t.blocks.end - 1; b >= t.blocks.first; --b) {
        if (!C.in_order() && b > t.blocks.first) load_k(b - 1);
        if constexpr (C.in_place) {
          load_transposed_v(b);
        } else {
          load_v(b);
        }
        if (C.in_order() && b > t.blocks.first) load_k(b - 1);
      }
    }
  }
};

}  // namespace tandem
