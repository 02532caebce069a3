// Writes a row that one warp has merged out of partial results (tile/split.cuh).
#pragma once

#include "tile/output.cuh"

namespace tandem::tile {

/// Writes a row, of which each lane has four columns of every 128.
template <Tiling T, int vectors>
TANDEM_DEVICE void store_merged_row(Output<T>& output, const TileIndex& t, const TileRow& row,
                                    const ptx::Float4 (&sum)[vectors], float factor, float lse,
                                    float largest_logit = -ptx::infinity()) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  if (lane == 0) output.store_lse(t, row.query, row.head, lse, largest_logit);
  auto* const out = output.out_row(t, row.query, row.head);
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    const int col = v * 128 + lane * 4;
    float each[4] = {sum[v].x * factor, sum[v].y * factor, sum[v].z * factor, sum[v].w * factor};
    if constexpr (T.gate) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (factor != 0.0F && col + i < output.p.head_dim_v)
          each[i] *= gate_at<T>(output.p, t, row.query, row.head, col + i);
      }
    }
    if constexpr (T.f32_out) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (col + i < output.p.head_dim_v) ptx::store_global(out + col + i, each[i]);
      }
    } else {
      const u32 words[2] = {pack<T.element>(each[0], each[1]), pack<T.element>(each[2], each[3])};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (col + i < output.p.head_dim_v) {
          ptx::store_global(out + col + i, static_cast<u16>(words[i / 2] >> (16 * (i % 2))));
        }
      }
    }
  }
}

}  // namespace tandem::tile
