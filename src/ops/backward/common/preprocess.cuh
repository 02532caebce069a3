// Before the main backward kernel: computes LSE and delta of every query in the form in which it reads them,
// and clears the dQ semaphores and the counts of finished tiles. Bound by memory: O and dO are read once.
#pragma once

#include "ops/backward/sm80/config.hpp"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "tile/backward_rows.cuh"
#include "tile/softmax.cuh"

namespace tandem {

/// Sum of out * dout over eight columns of a row.
template <Element element>
TANDEM_DEVICE float dot_columns(const u16* out, const u16* dout, int col, int columns, bool vectors) {
  float sum = 0.0F;
  if (vectors) {
    if (col >= columns) return 0.0F;
    const ptx::Vec4 a = ptx::load_global(reinterpret_cast<const ptx::Vec4*>(out + col));
    const ptx::Vec4 b = ptx::load_global(reinterpret_cast<const ptx::Vec4*>(dout + col));
    const u32 left[4] = {a.x, a.y, a.z, a.w};
    const u32 right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum = ptx::fma(tile::unpack_low<element>(left[i]), tile::unpack_low<element>(right[i]), sum);
      sum = ptx::fma(tile::unpack_high<element>(left[i]), tile::unpack_high<element>(right[i]), sum);
    }
    return sum;
  }
  for (int i = col; i < min(col + 8, columns); ++i) {
    sum = ptx::fma(ptx::unpack<element>(ptx::load_global(out + i)),
                   ptx::unpack<element>(ptx::load_global(dout + i)), sum);
  }
  return sum;
}

/// Which keys the queries of `t` see. All lanes call.
template <auto C>
TANDEM_DEVICE tile::Visibility visibility(const BackwardParams& p, const BackwardRows& t) {
  int seqlen_k = p.rows_k;
  if constexpr (C.mask.varlen) {
    seqlen_k =
        tile::other_side({p.cu_seqlens_k, p.seqused_k, p.rows_k, p.batch, p.heads_kv, p.packed_k}, t.batch)
            .used;
  }
  return {t.seqlen_q, seqlen_k, p.window_left, p.window_right};
}

/// Whether any of eight columns of a row is not 0.
TANDEM_DEVICE bool any_nonzero(const u16* row, int col, int columns) {
  u32 bits = 0;
  for (int i = col; i < min(col + 8, columns); ++i) bits |= ptx::load_global(row + i) & 0x7FFFU;
  return bits != 0;
}

/// Whether a row of 0 has seen no key, though a sink gives it an LSE: that is the sink's then. Keys that it
/// might have seen have less than a millionth of its sum.
TANDEM_DEVICE bool is_sinks_own(const BackwardParams& p, int head, float lse) {
  if (p.sink == nullptr) return false;
  const float sink = ptx::load_global(p.sink + head * p.sink_stride);
  const float difference = ptx::fmax(lse - sink, sink - lse);
  return difference <= 1e-6F * ptx::fmax(1.0F, ptx::fmax(sink, -sink));
}

/// One CTA for each query block and head. Of the fields of the Config that concern masks one is read:
/// functions.mask_function says that functions may hide all keys from a query.
template <auto C>
TANDEM_KERNEL __launch_bounds__(backward_rows_threads(C))
    backward_preprocess(const __grid_constant__ BackwardParams p) {
  constexpr int threads = backward_rows_threads(C);
  constexpr int lanes = C.tiling.head_dim_v <= 64    ? 8
                        : C.tiling.head_dim_v <= 128 ? 16
                                                     : 32;  ///< lanes of a row, 8 columns each
  static_assert(C.tiling.block_m % (threads / lanes) == 0);
  const int thread = static_cast<int>(ptx::thread_index());
  // The grid has a CTA for each query block of the workspace, and at least one for each counter.
  const int block = static_cast<int>(ptx::block_index());
  if (thread < C.dq_pieces()) {
    ptx::store_global(p.dq_semaphores + static_cast<i64>(block) * C.dq_pieces() + thread, 0U);
  }
  if (thread == 0 && block < (p.batch + 2) * p.heads_kv) ptx::store_global(p.tiles_added + block, 0U);
  BackwardRows t;
  if (locate_rows<C>(p, block, t)) {
    if constexpr (C.clears_sums) {
      auto* const sums =
          reinterpret_cast<ptx::Vec4*>(p.dq_sum + t.block * (C.tiling.block_m * C.tiling.head_dim_qk));
      for (int i = thread; i < C.tiling.block_m * C.tiling.head_dim_qk / 4; i += threads)
        ptx::store_global(sums + i, ptx::Vec4{0, 0, 0, 0});
    }
    const int batch = p.packed_q ? 0 : t.batch;
    const int lane = thread % lanes;
    const tile::Visibility visible = visibility<C>(p, t);
#pragma unroll
    for (int i = 0; i < C.tiling.block_m; i += threads / lanes) {
      const int row = i + thread / lanes;
      const i64 query = t.begin_q + static_cast<i64>(t.first + row);
      const bool used = t.first + row < t.seqlen_q;
      float sum = 0.0F;
      u32 nonzero = 0;
      if (used) {
        const u16* out = static_cast<const u16*>(p.out) + batch * p.out_stride.batch +
                         t.head * p.out_stride.head + query * p.out_stride.row;
        const u16* dout = static_cast<const u16*>(p.dout) + batch * p.dout_stride.batch +
                          t.head * p.dout_stride.head + query * p.dout_stride.row;
        sum = dot_columns<C.tiling.element>(out, dout, lane * 8, p.head_dim_v, p.rows_vectors);
        if constexpr (C.functions.mask_function) nonzero = any_nonzero(out, lane * 8, p.head_dim_v) ? 1 : 0;
      }
#pragma unroll
      for (int distance = 1; distance < lanes; distance *= 2) sum += ptx::shuffle_xor(sum, distance);
      if constexpr (C.functions.mask_function) {
#pragma unroll
        for (int distance = 1; distance < lanes; distance *= 2)
          nonzero |= ptx::shuffle_xor(nonzero, distance);
      }
      if (lane != 0) continue;
      float lse = -ptx::infinity();
      float dlse = 0.0F;
      if (used) {
        lse = ptx::load_global(p.lse + batch * p.lse_stride.batch + t.head * p.lse_stride.head +
                               query * p.lse_stride.row);
        if (p.dlse != nullptr) {
          dlse = ptx::load_global(p.dlse + batch * p.dlse_stride.batch + t.head * p.dlse_stride.head +
                                  query * p.dlse_stride.row);
        }
      }
      // A row that sees no key contributes nothing, whatever dO and dLSE hold there. (With a sink its LSE
      // does not show it.) A row that has seen a NaN passes NaN to the keys that it sees through its LSE. Its
      // delta must not be NaN: multiplied by 0, it would also reach the keys that it does not see.
      const int seen = visible.end_key(t.first + row) - visible.first_key(t.first + row);
      bool dead = lse == -ptx::infinity() || seen <= 0;
      if constexpr (C.functions.mask_function) {
        dead = dead || (used && nonzero == 0 && is_sinks_own(p, t.head, lse));
      }
      const bool number = lse < ptx::infinity();
      ptx::store_global(p.lse_log2 + t.block * C.tiling.block_m + row,
                        dead ? ptx::infinity() : lse * tile::log2_e);
      ptx::store_global(p.delta + t.block * C.tiling.block_m + row, dead || !number ? 0.0F : sum - dlse);
    }
  }
  ptx::launch_next_grid();
}

}  // namespace tandem
