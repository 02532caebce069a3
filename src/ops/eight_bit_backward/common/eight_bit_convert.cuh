// After the main kernel of the 8-bit backward pass: dq, of 16 bits or f32, from the f32 sums of dQ, while the
// main kernel computes its last tiles.
#pragma once

#include "ops/backward/common/convert.cuh"
#include "ops/eight_bit_backward/config.hpp"
#include "tile/rotate.cuh"

namespace tandem {

/// Adds, where the LSE has a gradient, what K's mean owes to dQ: of the rotated keys it has been removed, and
/// rows of dS add up to that gradient. `first`: the warpgroup's first row of the block.
template <EightBitBackwardConfig C>
TANDEM_DEVICE void add_mean(const EightBitBackwardParams& p, const BackwardRows& t,
                            const tile::FragmentPosition& position, int first,
                            float (&dq)[C.tiling.head_dim_qk / 2]) {
  const QuantizeParams& q = p.quantize;
  if (p.dlse == nullptr || q.mean == nullptr) return;
  const float* const mean = q.mean + t.batch * q.mean_stride.batch +
                            t.head / (p.heads_q / p.heads_kv) * q.mean_stride.head + position.first_col;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = t.first + first + position.row(h);
    if (row >= t.seqlen_q) continue;
    // r d is 0 of rows that see nothing, whose gradients are none.
    const float factor =
        ptx::load_global(p.row_factors + t.block * C.tiling.block_m + first + position.row(h));
    if (factor == 0.0F) continue;
    const float dlse = ptx::load_global(p.dlse + (p.packed_q ? 0 : t.batch) * p.dlse_stride.batch +
                                        t.head * p.dlse_stride.head +
                                        (t.begin_q + static_cast<i64>(row)) * p.dlse_stride.row);
#pragma unroll
    for (int i = 0; i < C.tiling.head_dim_qk / 4; ++i) {
      float& x = dq[i / 2 * 4 + 2 * h + i % 2];
      x = ptx::fma(dlse, ptx::load_global(mean + i / 2 * 8 + i % 2), x);
    }
  }
}

/// One CTA for each query block and head. Where both consumer warpgroups have columns of a row, its threads
/// read what threads of both wrote, so that they hold whole rows, which are rotated back.
template <EightBitBackwardConfig C>
TANDEM_KERNEL __launch_bounds__(eight_bit_convert_threads(C))
    eight_bit_convert(const __grid_constant__ EightBitBackwardParams p) {
  const int warpgroup = static_cast<int>(ptx::thread_index()) / warpgroup_size;
  const int thread = static_cast<int>(ptx::thread_index()) % warpgroup_size;
  const int first = 64 * warpgroup;
  BackwardRows t;
  ptx::outlast_previous_grid();
  if (!locate_rows<C>(p, static_cast<int>(ptx::block_index()), t)) return;
  const bool any = wait_for_sums<C>(p, t) && t.first < t.seqlen_q;
  const tile::FragmentPosition position(thread);
  float dq[C.tiling.head_dim_qk / 2];
  constexpr int of_piece = C.dq_columns() / 2;
#pragma unroll
  for (int i = 0; i < C.tiling.head_dim_qk / 8; ++i) {
    const auto* const piece = reinterpret_cast<const ptx::Float4*>(
        p.dq_sum + t.block * (C.tiling.block_m * C.tiling.head_dim_qk) +
        (4 * i / of_piece * C.tiling.row_groups() + warpgroup) * C.dq_values());
    const ptx::Float4 four =
        any ? ptx::load_global(piece + i % (of_piece / 4) * warpgroup_size + thread) : ptx::Float4{};
    dq[4 * i] = four.x;
    dq[4 * i + 1] = four.y;
    dq[4 * i + 2] = four.z;
    dq[4 * i + 3] = four.w;
  }
  if (any) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float factor =
          ptx::load_global(p.row_factors + t.block * C.tiling.block_m + first + position.row(h));
#pragma unroll
      for (int i = 0; i < C.tiling.head_dim_qk / 4; ++i) dq[i / 2 * 4 + 2 * h + i % 2] *= factor;
    }
    tile::rotate_back<C.tiling.head_dim_qk>(dq, position, p.head_dim_qk);
    add_mean<C>(p, t, position, first, dq);
  }
  using Gradient = typename Select<C.f32_dq, float, u16>::type;
  tile::RowsOf<Gradient> rows{static_cast<Gradient*>(p.dq) + (p.packed_q ? 0 : t.batch) * p.dq_stride.batch +
                                  t.head * p.dq_stride.head + static_cast<i64>(t.begin_q) * p.dq_stride.row,
                              p.dq_stride.row, p.head_dim_qk, p.dq_vectors};
  if constexpr (C.f32_dq) rows.added = (p.added & added_dq) != 0;
  tile::store_rows<C.tiling.element>(rows, dq, p.score.scale, t.first + first, 0, t.seqlen_q, t.end_q,
                                     thread);
}

}  // namespace tandem
