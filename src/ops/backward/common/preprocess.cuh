// Before the main backward kernel: computes LSE and delta of every query in the form in which it reads them,
// and clears the dQ semaphores and the counts of finished tiles. Bound by memory: O and dO are read once.
// With an output gate it makes its gradient, and the dO that the other kernels read, on the way.
#pragma once

#include "ops/backward/sm80/config.hpp"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "tile/backward_rows.cuh"
#include "tile/gate.cuh"
#include "tile/load_elements.cuh"
#include "tile/softmax.cuh"
#include "tile/store_rows.cuh"

namespace tandem {

/// The sum of out * dout over eight columns of a row.
template <Element element>
TANDEM_DEVICE float dot_vectors(const ptx::Vec4& out, const ptx::Vec4& dout) {
  const u32 left[4] = {out.x, out.y, out.z, out.w};
  const u32 right[4] = {dout.x, dout.y, dout.z, dout.w};
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = ptx::fma(tile::unpack_low<element>(left[i]), tile::unpack_low<element>(right[i]), sum);
    sum = ptx::fma(tile::unpack_high<element>(left[i]), tile::unpack_high<element>(right[i]), sum);
  }
  return sum;
}

/// Which of the rows of a query block a thread reads: in pass i row i * rows + thread / lanes, of which it
/// has eight columns. Lane i of a row's then stores what was found of pass i's row.
template <auto C>
struct PreprocessPasses {
  static constexpr int threads = backward_rows_threads(C);
  static constexpr int lanes = C.tiling.head_dim_v <= 64 ? 8 : C.tiling.head_dim_v <= 128 ? 16 : 32;
  static constexpr int rows = threads / lanes;
  static constexpr int count = C.tiling.block_m / rows;
  static constexpr int at_once = count < 4 ? count : 4;  ///< passes whose loads are in flight together
  static_assert(count * rows == C.tiling.block_m && count % at_once == 0 && count <= lanes);
};

/// The thread's part of out * dout of each pass's row. Memory bounds the kernel, so a thread asks for the
/// vectors of several rows before it waits for one.
template <auto C>
TANDEM_DEVICE void dot_rows(float (&sums)[PreprocessPasses<C>::count], const BackwardParams& p,
                            const BackwardRows& t, const u16* out, const u16* dout) {
  using Passes = PreprocessPasses<C>;
  const int thread = static_cast<int>(ptx::thread_index());
  const int col = thread % Passes::lanes * 8;
  const int first = thread / Passes::lanes;
  out += first * p.out_stride.row;
  dout += first * p.dout_stride.row;
#pragma unroll
  for (int i = 0; i < Passes::count; i += Passes::at_once) {
    ptx::Vec4 a[Passes::at_once];
    ptx::Vec4 b[Passes::at_once];
    const auto load = [&](auto columns) {
#pragma unroll
      for (int j = 0; j < Passes::at_once; ++j) {
        const int row = (i + j) * Passes::rows;
        const bool used = t.first + first + row < t.seqlen_q && col < p.head_dim_v;
        a[j] = used ? columns(out + row * p.out_stride.row) : ptx::Vec4{};
        b[j] = used ? columns(dout + row * p.dout_stride.row) : ptx::Vec4{};
      }
    };
    if (p.rows_vectors) {
      load([&](const u16* row) { return ptx::load_global(reinterpret_cast<const ptx::Vec4*>(row + col)); });
    } else {
      load([&](const u16* row) { return tile::load_elements(row, col, p.head_dim_v, true); });
    }
#pragma unroll
    for (int j = 0; j < Passes::at_once; ++j) sums[i + j] = dot_vectors<C.tiling.element>(a[j], b[j]);
  }
}

/// The gradients of eight columns of O and of its gate. With s = sigmoid(gate), where out = O * s and `dout`
/// is the gradient of out, they are dout * s and dout * out * (1 - s). Where out is 0 so is the latter, and
/// with it that of a query that sees no key, whatever dout and gate hold.
template <Element element>
TANDEM_DEVICE void differentiate_gate(const ptx::Vec4& gate, const ptx::Vec4& out, const ptx::Vec4& dout,
                                      ptx::Vec4& before, ptx::Vec4& dgate) {
  const u32 gates[4] = {gate.x, gate.y, gate.z, gate.w};
  const u32 outs[4] = {out.x, out.y, out.z, out.w};
  const u32 gradients[4] = {dout.x, dout.y, dout.z, dout.w};
  u32 of_o[4];
  u32 of_gate[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float o[2];
    float g[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto half = [&](u32 word) {
        return h == 0 ? tile::unpack_low<element>(word) : tile::unpack_high<element>(word);
      };
      const float value = half(outs[i]);
      const float gradient = half(gradients[i]);
      const float x = half(gates[i]);
      o[h] = gradient * tile::sigmoid_of(x);
      g[h] = value == 0.0F ? 0.0F : gradient * value * tile::sigmoid_of(-x);
    }
    of_o[i] = tile::pack<element>(o[0], o[1]);
    of_gate[i] = tile::pack<element>(g[0], g[1]);
  }
  before = {of_o[0], of_o[1], of_o[2], of_o[3]};
  dgate = {of_gate[0], of_gate[1], of_gate[2], of_gate[3]};
}

/// dot_rows behind a gate: writes dO and dgate, of rows past the end zeros.
template <auto C>
TANDEM_DEVICE void dot_gated_rows(float (&sums)[PreprocessPasses<C>::count], const GatedBackwardParams& p,
                                  const BackwardRows& t) {
  using Passes = PreprocessPasses<C>;
  constexpr int at_once = Passes::count < 2 ? Passes::count : 2;  // a row has five vectors
  const int thread = static_cast<int>(ptx::thread_index());
  const int col = thread % Passes::lanes * 8;
  const int first = thread / Passes::lanes;
  const i64 query = t.begin_q + static_cast<i64>(t.first) + first;
  const auto row_of = [&](const void* x, const Strides& s, int row) {
    return static_cast<const u16*>(x) + (p.packed_q ? 0 : t.batch) * s.batch + t.head * s.head +
           (query + row) * s.row;
  };
  const bool vectors = p.rows_vectors && p.gate_vectors;
  const auto load = [&](const u16* row) {
    return vectors ? ptx::load_global(reinterpret_cast<const ptx::Vec4*>(row + col))
                   : tile::load_elements(row, col, p.head_dim_v, true);
  };
#pragma unroll
  for (int i = 0; i < Passes::count; i += at_once) {
    ptx::Vec4 out[at_once], dout[at_once], gate[at_once];
#pragma unroll
    for (int j = 0; j < at_once; ++j) {
      const int row = (i + j) * Passes::rows;
      const bool used = t.first + first + row < t.seqlen_q && col < p.head_dim_v;
      out[j] = used ? load(row_of(p.out, p.out_stride, row)) : ptx::Vec4{};
      dout[j] = used ? load(row_of(p.gated_dout, p.gated_dout_stride, row)) : ptx::Vec4{};
      gate[j] = used ? load(row_of(p.gate, p.gate_stride, row)) : ptx::Vec4{};
    }
#pragma unroll
    for (int j = 0; j < at_once; ++j) {
      sums[i + j] = dot_vectors<C.tiling.element>(out[j], dout[j]);
      const int row = (i + j) * Passes::rows;
      if (t.first + first + row >= t.end_q || col >= p.head_dim_v) continue;
      ptx::Vec4 before;
      ptx::Vec4 dgate;
      differentiate_gate<C.tiling.element>(gate[j], out[j], dout[j], before, dgate);
      // Rows of the workspace are whole vectors.
      auto* const to = const_cast<u16*>(row_of(p.dout, p.dout_stride, row)) + col;
      ptx::store_global(reinterpret_cast<ptx::Vec4*>(to), before);
      if (p.dgate == nullptr) continue;
      auto* const of_gate = const_cast<u16*>(row_of(p.dgate, p.dgate_stride, row)) + col;
      const u32 words[4] = {dgate.x, dgate.y, dgate.z, dgate.w};
      if (vectors) {
        tile::store_columns<true>(of_gate, p.head_dim_v - col, words);
      } else {
        tile::store_columns<false>(of_gate, p.head_dim_v - col, words);
      }
    }
  }
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

/// Whether any column of each pass's row is not 0: bit i of pass i. All lanes call.
template <auto C>
TANDEM_DEVICE u32 nonzero_rows(const BackwardParams& p, const BackwardRows& t, const u16* out) {
  using Passes = PreprocessPasses<C>;
  const int thread = static_cast<int>(ptx::thread_index());
  u32 nonzero = 0;
  for (int i = 0; i < Passes::count; ++i) {
    const int row = i * Passes::rows + thread / Passes::lanes;
    if (t.first + row >= t.seqlen_q) continue;
    if (any_nonzero(out + row * p.out_stride.row, thread % Passes::lanes * 8, p.head_dim_v))
      nonzero |= 1U << i;
  }
#pragma unroll
  for (int distance = 1; distance < Passes::lanes; distance *= 2)
    nonzero |= ptx::shuffle_xor(nonzero, distance);
  return nonzero;
}

/// What the kernels below do, by their parameters.
template <auto C, typename Params>
TANDEM_DEVICE void preprocess(const Params& p) {
  using Passes = PreprocessPasses<C>;
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
      for (int i = thread; i < C.tiling.block_m * C.tiling.head_dim_qk / 4; i += Passes::threads)
        ptx::store_global(sums + i, ptx::Vec4{0, 0, 0, 0});
    }
    const int batch = p.packed_q ? 0 : t.batch;
    const i64 query = t.begin_q + static_cast<i64>(t.first);
    const auto first_row = [&](const void* x, const Strides& s) {
      return static_cast<const u16*>(x) + batch * s.batch + t.head * s.head + query * s.row;
    };
    const u16* const out = first_row(p.out, p.out_stride);
    const int lane = thread % Passes::lanes;
    const int row = lane * Passes::rows + thread / Passes::lanes;  // that the thread stores
    const bool stores = lane < Passes::count;
    const bool used = stores && t.first + row < t.seqlen_q;
    float lse = -ptx::infinity();
    float dlse = 0.0F;
    if (used) {
      lse = ptx::load_global(p.lse + batch * p.lse_stride.batch + t.head * p.lse_stride.head +
                             (query + row) * p.lse_stride.row);
      if (p.dlse != nullptr) {
        dlse = ptx::load_global(p.dlse + batch * p.dlse_stride.batch + t.head * p.dlse_stride.head +
                                (query + row) * p.dlse_stride.row);
      }
    }
    const tile::Visibility visible = visibility<C>(p, t);
    float sums[Passes::count];
    if constexpr (requires { p.gate; }) {
      dot_gated_rows<C>(sums, p, t);
    } else {
      dot_rows<C>(sums, p, t, out, first_row(p.dout, p.dout_stride));
    }
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < Passes::count; ++i) {
#pragma unroll
      for (int distance = 1; distance < Passes::lanes; distance *= 2)
        sums[i] += ptx::shuffle_xor(sums[i], distance);
      sum = lane == i ? sums[i] : sum;
    }
    u32 nonzero = 0;
    if constexpr (C.functions.mask_function) nonzero = nonzero_rows<C>(p, t, out);
    if (stores) {
      // A row that sees no key contributes nothing, whatever dO and dLSE hold there. (With a sink its LSE
      // does not show it.) A row that has seen a NaN passes NaN to the keys that it sees through its LSE. Its
      // delta must not be NaN: multiplied by 0, it would also reach the keys that it does not see.
      const int seen = visible.end_key(t.first + row) - visible.first_key(t.first + row);
      bool dead = lse == -ptx::infinity() || seen <= 0;
      if constexpr (C.functions.mask_function) {
        dead = dead || (used && (nonzero >> lane & 1U) == 0 && is_sinks_own(p, t.head, lse));
      }
      const bool number = lse < ptx::infinity();
      ptx::store_global(p.lse_log2 + t.block * C.tiling.block_m + row,
                        dead ? ptx::infinity() : lse * tile::log2_e);
      ptx::store_global(p.delta + t.block * C.tiling.block_m + row, dead || !number ? 0.0F : sum - dlse);
    }
  }
  ptx::launch_next_grid();
}

/// One CTA for each query block and head. Of the fields of the Config that concern masks one is read:
/// functions.mask_function says that functions may hide all keys from a query.
template <auto C>
TANDEM_KERNEL __launch_bounds__(backward_rows_threads(C))
    backward_preprocess(const __grid_constant__ BackwardParams p) {
  preprocess<C>(p);
}
template <auto C>
TANDEM_KERNEL __launch_bounds__(backward_rows_threads(C))
    backward_gated_preprocess(const __grid_constant__ GatedBackwardParams p) {
  preprocess<C>(p);
}

}  // namespace tandem
