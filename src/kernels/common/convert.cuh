// Beside the end of the main backward kernel the f32 sums of dQ become dq; after it dsink is summed.
#pragma once

#include "kernels/config/backward.hpp"
#include "kernels/ptx/barrier.cuh"
#include "kernels/tile/backward_tiles.cuh"
#include "kernels/tile/softmax.cuh"
#include "kernels/tile/store_rows.cuh"

namespace tandem {

/// Waits until all key tiles of a query block's head have been added up; false if it has none. This grid
/// begins beside the main one's last tiles, which leave processors free, and not before every block of the
/// main grid has waited for the one that clears the counters: the last call's numbers are gone.
template <BackwardConfig C>
TANDEM_DEVICE bool wait_for_sums(const BackwardParams& p, const BackwardRows& t) {
  int tiles = p.n_blocks;
  if constexpr (C.varlen) {
    const tile::SequenceRows keys =
        tile::other_side({p.cu_seqlens_k, p.seqused_k, p.rows_k, p.batch, p.heads_kv, p.packed_k}, t.batch);
    tiles = ceil_div(keys.end - keys.begin, C.tile_keys());
  }
  if (tiles == 0) return false;
  if (ptx::thread_index() == 0) {
    const int head_kv = t.head / (p.heads_q / p.heads_kv);
    ptx::wait_long(tiles_added(p, t.batch, head_kv), static_cast<u32>(tiles * C.dq_pieces()));
  }
  ptx::sync_block();
  return true;
}

/// One block of threads a query block and head; each reads what the same thread of the main kernel's
/// consumers wrote, so that it holds an accumulator of 64 rows again. Of the Config, what concerns masks is
/// not read.
template <BackwardConfig C>
TANDEM_KERNEL __launch_bounds__(backward_rows_threads(C))
    backward_convert(const __grid_constant__ BackwardParams p) {
  constexpr int registers = C.dq_columns() / 2;
  // All lanes locate, so the warpgroup is taken for uniform too.
  const int warpgroup = static_cast<int>(ptx::shuffle(ptx::thread_index() / warpgroup_size, 0));
  const int thread = static_cast<int>(ptx::thread_index()) % warpgroup_size;
  BackwardRows t;
  // So that whoever waits for this grid waits for the main one's dK and dV, too.
  if (ptx::block_index() + 1 == ptx::grid_size()) ptx::wait_for_previous_grid();
  if (!locate_rows<C>(p, static_cast<int>(ptx::block_index()), t)) return;
  const bool added = wait_for_sums<C>(p, t);
  const auto* sums = reinterpret_cast<const ptx::Float4*>(p.dq_sum + t.block * (C.block_m * C.head_dim_qk)) +
                     warpgroup * warpgroup_size * (registers / 4) + thread;
  float dq[registers];
  // No key has been seen, and nothing stored, where nobody has had a turn.
  const bool any = added && ptx::load_written(p.turns + t.block * C.dq_pieces() + warpgroup) != 0;
#pragma unroll
  for (int u = 0; u < registers / 4; ++u) {
    const ptx::Float4 four = any ? ptx::load_global(sums + u * warpgroup_size) : ptx::Float4{};
    dq[4 * u] = four.x;
    dq[4 * u + 1] = four.y;
    dq[4 * u + 2] = four.z;
    dq[4 * u + 3] = four.w;
  }
  const tile::RowTarget rows{static_cast<u16*>(p.dq) + (p.packed_q ? 0 : t.batch) * p.dq_stride.batch +
                                 t.head * p.dq_stride.head + static_cast<i64>(t.begin_q) * p.dq_stride.row,
                             p.dq_stride.row, p.head_dim_qk, p.dq_vectors};
  tile::store_rows<C.element>(rows, dq, p.scale, t.first + warpgroup % C.dq_row_groups() * 64,
                              warpgroup / C.dq_row_groups() * C.dq_columns(), t.seqlen_q, t.end_q, thread);
}

/// dsink = - sum of exp(sink - LSE) * delta over all queries of a head: one block of threads a head, in an
/// order that only the lengths decide. Queries that see no key have LSE = sink and delta = -dLSE, of which
/// the workspace has nothing: the main kernel is to take nothing from them.
template <BackwardConfig C>
TANDEM_KERNEL __launch_bounds__(backward_sink_threads)
    backward_sink(const __grid_constant__ BackwardParams p) {
  const int thread = static_cast<int>(ptx::thread_index());
  const int head = static_cast<int>(ptx::block_index());
  const float sink = ptx::load_global(p.sink + head * p.sink_stride) * tile::log2_e;
  float sum = 0.0F;
  for (int b = 0; b < p.batch; ++b) {
    const tile::SequenceRows rows = tile::sequence_rows(p.cu_seqlens_q, p.seqused_q, p.rows_q, b);
    const i64 first = workspace_block(p, head, first_query_block<C>(p, b, rows.begin)) * C.block_m;
    const i64 dlse_at = (p.packed_q ? 0 : b) * p.dlse_stride.batch + head * p.dlse_stride.head;
    for (int i = thread; i < rows.used; i += backward_sink_threads) {
      const float lse = ptx::load_global(p.lse_log2 + first + i);
      if (lse == ptx::infinity() && p.dlse != nullptr) {
        sum += ptx::load_global(p.dlse + dlse_at + (rows.begin + static_cast<i64>(i)) * p.dlse_stride.row);
      }
      const float probability = ptx::exp2(sink - lse);
      sum = ptx::fma(-probability, ptx::load_global(p.delta + first + i), sum);
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
