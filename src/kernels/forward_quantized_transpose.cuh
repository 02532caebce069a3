// Rows of V's codes, as a caller has them, into the tile that P V reads: keys contiguous, in the order of
// quantized_layout.hpp. Three warps beside the loader's do it, a block of keys behind the copy engine and up
// to all of V's buffers ahead of the consumers.
#pragma once

#include "kernels/forward_quantized_producer.cuh"
#include "kernels/ptx/codes.cuh"

namespace tandem {

template <QuantizedConfig C>
struct ValueTransposer {
  using Shared = QuantizedShared<C>;

  const QuantizedParams& p;
  Shared& shared;
  const int warp;  ///< of those that transpose
  const int lane;
  tile::Ring<1>::Position from;
  typename tile::Ring<C.stages>::Position to;
  ForwardTiles<C.forward()> tiles;
  ForwardTile<C.forward()> t;

  TANDEM_DEVICE ValueTransposer(const QuantizedParams& params, Shared& s, int warp_)
      : p(params),
        shared(s),
        warp(warp_),
        lane(static_cast<int>(ptx::thread_index()) % warp_size),
        tiles(params.forward, s.tiles) {}

  /// The sign of a block's scale, as it changes four codes.
  TANDEM_DEVICE u32 sign_of(int b) const {
    const int head = t.index.head / (p.forward.heads_q / p.forward.heads_kv);
    return load_scale<C>(p.v_scales, t.index.batch, head, b) < 0.0F ? 0x80808080U : 0U;
  }

  /// 32 keys of 16 channels. A lane has pairs of channels of two neighbouring keys in each of four groups of
  /// 8 keys. Two groups make the words that its quad of the consumers wants of two channels: stored position
  /// 4 q + i of 16 holds key 2 q + i % 2 + 8 (i / 2).
  struct Piece {
    u32 pairs[4];

    TANDEM_DEVICE void load(const Shared& shared, int first_key, int channel, int lane) {
      const auto& tile = shared.rows_of_v.tile;
      ptx::ldmatrix_x4_transposed(tile.data + tile.place(first_key + lane, channel), pairs);
    }
    /// Keys from `end` on become code 0: what is past a sequence's end may be no number.
    TANDEM_DEVICE void clear_from(int end, int first_key, int lane) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + 8 * i + lane % 4 * 2;
        if (key + 1 >= end) pairs[i] = key >= end ? 0 : pairs[i] & 0xFFFFU;
      }
    }
    /// Lanes of the lower half store even channels first, the others odd ones: the eight rows of a matrix
    /// are then in eight different groups of banks.
    TANDEM_DEVICE void store(Shared& shared, int stage, int first_key, int channel, int lane, u32 sign) {
      const bool odd = lane >= 16;
      const u32 first = odd ? 0x7531U : 0x6420U;
      const u32 second = odd ? 0x6420U : 0x7531U;
      const int row = channel + lane % 8 * 2 + ((lane % 8 / 4) ^ (lane / 8 & 1));
      auto& tile = shared.v[stage];
      ptx::stmatrix_x4(tile.data + tile.place(row, first_key + lane / 16 * 16),
                       ptx::permute_bytes(pairs[0], pairs[1], first) ^ sign,
                       ptx::permute_bytes(pairs[0], pairs[1], second) ^ sign,
                       ptx::permute_bytes(pairs[2], pairs[3], first) ^ sign,
                       ptx::permute_bytes(pairs[2], pairs[3], second) ^ sign);
    }
  };

  TANDEM_DEVICE void transpose(int b) {
    const u32 sign = sign_of(b);
    shared.rows_of_v_ring.ring.wait(from);
    shared.v_ring.wait_free(to);
    // Two pieces at a time, so that the loads of one pass while the other's are on their way.
    constexpr int pairs = C.head_dim_v / 16 * 2;
#pragma unroll 1
    for (int i = warp; i < pairs; i += transposing_warps) {
      Piece pieces[2];
      const int key = i % 2 * 64;
      const int channel = i / 2 * 16;
#pragma unroll
      for (int n = 0; n < 2; ++n) pieces[n].load(shared, key + 32 * n, channel, lane);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if constexpr (C.ragged) {
          pieces[n].clear_from(t.index.seqlen_k - b * quant_block, key + 32 * n, lane);
        }
        pieces[n].store(shared, to.stage, key + 32 * n, channel, lane, sign);
      }
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
