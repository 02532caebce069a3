// The kernels after the main backward kernel: one makes dq, of 16 bits or f32, from the f32 sums of dQ, while
// the main kernel computes its last tiles, and one sums dsink.
#pragma once

#include "ops/backward/sm80/config.hpp"
#include "ptx/barrier.cuh"
#include "tile/backward_rows.cuh"
#include "tile/select.cuh"
#include "tile/softmax.cuh"
#include "tile/store_rows.cuh"

namespace tandem {

/// Waits until all key tiles of a query block's head have added to dQ; false if the head has none. This grid
/// starts during the main kernel's last tiles, which leave SMs free. It does not start before every CTA of
/// the main grid has waited for the preprocess kernel, so the counters of the previous call have been
/// cleared.
template <auto C>
TANDEM_DEVICE bool wait_for_sums(const BackwardParams& p, const BackwardRows& t) {
  int tiles = p.n_blocks;
  if constexpr (C.mask.varlen) {
    const tile::SequenceRows keys =
        tile::other_side({p.cu_seqlens_k, p.seqused_k, p.rows_k, p.batch, p.heads_kv, p.packed_k}, t.batch);
    tiles = ceil_div(keys.end - keys.begin, C.tile_keys());
  }
  if (tiles == 0) return false;
  if (ptx::thread_index() == 0) {
    const int head_kv = t.head / (p.heads_q / p.heads_kv);
    ptx::semaphore_wait_long(tiles_added(p, t.batch, head_kv), static_cast<u32>(tiles * C.dq_pieces()));
  }
  ptx::sync_block();
  return true;
}

/// One CTA for each query block and head. Each thread reads what the same thread of the main kernel's
/// consumers wrote, so that a warpgroup holds the accumulators of 64 rows again, or of a block of 32. The
/// fields of the Config
/// that concern masks are not read, so that one kernel serves several Configs of the main one.
template <auto C>
TANDEM_KERNEL __launch_bounds__(backward_rows_threads(C))
    backward_convert(const __grid_constant__ BackwardParams p) {
  constexpr int registers = C.dq_columns() / 2;
  // All lanes of a warp search in locate_rows, so the warpgroup's number must be uniform too.
  const int warpgroup = static_cast<int>(ptx::shuffle(ptx::thread_index() / warpgroup_size, 0));
  const int thread = static_cast<int>(ptx::thread_index()) % warpgroup_size;
  BackwardRows t;
  ptx::outlast_previous_grid();
  if (!locate_rows<C>(p, static_cast<int>(ptx::block_index()), t)) return;
  const bool added = wait_for_sums<C>(p, t);
  if constexpr (C.tiling.block_m < 64) {  // two warps have all rows of a half of the columns
    if (warpgroup != 0) return;
  }
  float dq[registers];
  if constexpr (C.clears_sums) {  // the preprocess kernel has cleared the sums
    const float* const sums =
        p.dq_sum + t.block * (C.tiling.block_m * C.tiling.head_dim_qk) + warpgroup * C.dq_values() + thread;
#pragma unroll
    for (int i = 0; i < registers; ++i) dq[i] = added ? ptx::load_written(sums + i * warpgroup_size) : 0.0F;
  } else {
    const auto* sums =
        reinterpret_cast<const ptx::Float4*>(p.dq_sum + t.block * (C.tiling.block_m * C.tiling.head_dim_qk)) +
        warpgroup * warpgroup_size * (registers / 4) + thread;
    // If the semaphore is 0, no tile has stored anything: the queries see no key.
    const bool any = added && ptx::load_written(p.dq_semaphores + t.block * C.dq_pieces() + warpgroup) != 0;
#pragma unroll
    for (int u = 0; u < registers / 4; ++u) {
      const ptx::Float4 four = any ? ptx::load_global(sums + u * warpgroup_size) : ptx::Float4{};
      dq[4 * u] = four.x;
      dq[4 * u + 1] = four.y;
      dq[4 * u + 2] = four.z;
      dq[4 * u + 3] = four.w;
    }
  }
  using Gradient = typename Select<C.f32_dq, float, u16>::type;
  tile::RowsOf<Gradient> rows{static_cast<Gradient*>(p.dq) + (p.packed_q ? 0 : t.batch) * p.dq_stride.batch +
                                  t.head * p.dq_stride.head + static_cast<i64>(t.begin_q) * p.dq_stride.row,
                              p.dq_stride.row, p.head_dim_qk, p.dq_vectors};
  if constexpr (C.f32_dq) rows.added = (p.added & added_dq) != 0;
  if constexpr (C.tiling.block_m < 64) {
    tile::store_rows<C.tiling.element>(rows, dq, p.score.scale, t.first, thread / 64 * C.dq_columns(),
                                       t.seqlen_q, t.end_q, thread % 64);
    return;
  }
  tile::store_rows<C.tiling.element>(
      rows, dq, p.score.scale, t.first + warpgroup % C.tiling.row_groups() * 64,
      warpgroup / C.tiling.row_groups() * C.dq_columns(), t.seqlen_q, t.end_q, thread);
}

/// dsink = - sum of exp(sink - LSE) * delta over all queries of a head. One CTA sums a head, in an order that
/// depends on nothing but the lengths. Queries that see no key have LSE = sink and delta = -dLSE; the
/// workspace says +inf and 0 instead, so that the main kernel takes nothing from them, and so they are
/// treated apart.
template <auto C>
TANDEM_KERNEL __launch_bounds__(backward_sink_threads)
    backward_sink(const __grid_constant__ BackwardParams p) {
  const int thread = static_cast<int>(ptx::thread_index());
  const int head = static_cast<int>(ptx::block_index());
  const float sink = ptx::load_global(p.sink + head * p.sink_stride) * tile::log2_e;
  float sum = 0.0F;
  for (int b = 0; b < p.batch; ++b) {
    const tile::SequenceRows rows = tile::sequence_rows(p.cu_seqlens_q, p.seqused_q, p.rows_q, b);
    const i64 first = workspace_block(p, head, first_query_block<C>(p, b, rows.begin)) * C.tiling.block_m;
    const i64 dlse_at = (p.packed_q ? 0 : b) * p.dlse_stride.batch + head * p.dlse_stride.head;
    constexpr int at_once = 8;  // rows whose loads are in flight together
    for (int from = thread; from < rows.used; from += at_once * backward_sink_threads) {
      float lse[at_once];
      float delta[at_once];
#pragma unroll
      for (int j = 0; j < at_once; ++j) {
        const int i = from + j * backward_sink_threads;
        lse[j] = i < rows.used ? ptx::load_global(p.lse_log2 + first + i) : 0.0F;
        delta[j] = i < rows.used ? ptx::load_global(p.delta + first + i) : 0.0F;
      }
#pragma unroll
      for (int j = 0; j < at_once; ++j) {
        const int i = from + j * backward_sink_threads;
        if (i >= rows.used) break;
        if (lse[j] == ptx::infinity() && p.dlse != nullptr) {
          sum += ptx::load_global(p.dlse + dlse_at + (rows.begin + static_cast<i64>(i)) * p.dlse_stride.row);
        }
        sum = ptx::fma(-ptx::exp2(sink - lse[j]), delta[j], sum);
      }
    }
  }
  auto* sums = reinterpret_cast<float*>(ptx::dynamic_shared());
  ptx::store_shared(sums + thread, sum);
  ptx::sync_block();
  for (int half = backward_sink_threads / 2; half > 0; half /= 2) {
    if (thread < half) {
      ptx::store_shared(sums + thread,
                        ptx::load_shared(sums + thread) + ptx::load_shared(sums + thread + half));
    }
    ptx::sync_block();
  }
  if (thread == 0) ptx::store_global(p.dsink + head * p.dsink_stride, ptx::load_shared(sums));
}

}  // namespace tandem
