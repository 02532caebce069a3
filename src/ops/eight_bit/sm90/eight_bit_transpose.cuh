// Transposes caller-supplied, row-major V into the tile that P V reads: keys contiguous, in the order of
// quantized_layout.hpp. Three warps of the producer's warpgroup do it, up to two blocks of keys behind TMA
// and as many blocks ahead of the consumers as V has buffers.
#pragma once

#include "ops/eight_bit/sm90/eight_bit_producer.cuh"
#include "ptx/eight_bit.cuh"

namespace tandem {

template <EightBitConfig C>
struct ValueTransposer {
  using Shared = EightBitShared<C>;

  const EightBitParams& p;
  Shared& shared;
  const int warp;  ///< number among those that transpose
  const int lane;
  tile::Ring<rows_of_v_stages>::Position from;
  typename tile::Ring<C.stages>::Position to;
  tile::QueryTiles<C.tiling, C.mask, C.schedule.dynamic> tiles;
  tile::QueryTile t;

  TANDEM_DEVICE ValueTransposer(const EightBitParams& params, Shared& s, int warp_)
      : p(params),
        shared(s),
        warp(warp_),
        lane(static_cast<int>(ptx::thread_index()) % warp_size),
        tiles(params.forward, s.tiles) {}

  /// What negates four values if the block's scale is negative.
  TANDEM_DEVICE u32 sign_of(int b) const {
    const int head = t.index.head / (p.forward.heads_q / p.forward.heads_kv);
    return load_scale<C>(p.v_scales, t.index.batch, head, b) < 0.0F ? 0x80808080U : 0U;
  }

  /// Transposes all keys of 16 channels. Of 32 keys a lane has, in each of four groups of 8, two channels of
  /// two neighbouring keys. Two such groups form the words of two channels that a quad of the consumers
  /// reads: stored position 4 q + i of 16 holds key 2 q + i % 2 + 8 (i / 2).
  TANDEM_DEVICE void transpose(int channel, int b, u32 sign) {
    constexpr int pieces = quant_block / 32;
    const auto& rows = shared.rows_of_v.tile[from.stage];
    auto& columns = shared.v[to.stage];
    const char* const source = rows.data + rows.place(lane, channel);
    u32 pairs[pieces][4];
#pragma unroll
    for (int n = 0; n < pieces; ++n) {
      ptx::ldmatrix_x4_transposed(source + n * 32 * rows.strip_cols, pairs[n]);
    }
    // The lower 16 lanes store even channels first, the upper ones odd channels: the eight rows of a matrix
    // are then in eight different groups of banks.
    const bool odd = lane >= 16;
    const u32 first = odd ? 0x7531U : 0x6420U;
    const u32 second = odd ? 0x6420U : 0x7531U;
    const int row = channel + lane % 8 * 2 + ((lane % 8 / 4) ^ (lane / 8 & 1));
    const u32 target = columns.place(row, lane / 16 * 16);
#pragma unroll
    for (int n = 0; n < pieces; ++n) {
      u32(&x)[4] = pairs[n];
      if constexpr (C.mask.varlen) clear_from(t.index.seqlen_k - b * quant_block - 32 * n, x);
      ptx::stmatrix_x4(
          columns.data + (target ^ static_cast<u32>(32 * n)), ptx::permute_bytes(x[0], x[1], first) ^ sign,
          ptx::permute_bytes(x[0], x[1], second) ^ sign, ptx::permute_bytes(x[2], x[3], first) ^ sign,
          ptx::permute_bytes(x[2], x[3], second) ^ sign);
    }
  }
  /// Sets keys from `end` on, of 32, to 0: rows past a sequence's end may hold NaN.
  TANDEM_DEVICE void clear_from(int end, u32 (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 8 * i + lane % 4 * 2;
      if (key + 1 >= end) x[i] = key >= end ? 0 : x[i] & 0xFFFFU;
    }
  }

  TANDEM_DEVICE void transpose(int b) {
    const u32 sign = sign_of(b);
    shared.rows_of_v_ring.ring.wait(from);
    shared.v_ring.wait_free(to);
#pragma unroll 1
    for (int group = warp; group < C.tiling.head_dim_v / 16; group += transposing_warps) {
      transpose(16 * group, b, sign);
    }
    ptx::fence_async_shared();
    ptx::sync_warp();
    if (lane == 0) {
      shared.v_ring.hand_over(to);
      shared.rows_of_v_ring.ring.release(from);
    }
    from.advance();
    to.advance();
  }

  TANDEM_DEVICE void run() {
    while (tiles.template next<false>(t, lane == 0)) {
      for (int b = t.blocks.end - 1; b >= t.blocks.first; --b) transpose(b);
    }
  }
};

}  // namespace tandem
