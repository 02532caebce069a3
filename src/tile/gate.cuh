// An output gate: out is O times the sigmoid of a gate, element by element, before it is rounded.
#pragma once

#include "ops/forward/config.hpp"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/fragment.cuh"
#include "tile/softmax.cuh"
#include "tile/walk.cuh"

namespace tandem::tile {

/// 1 / (1 + e^-gate); below 2^-126 it is 0.
TANDEM_DEVICE float sigmoid_of(float gate) {
  return ptx::reciprocal(1.0F + ptx::exp2(gate * -log2_e));
}

/// The gate of a row; `p` is that of a Config with one.
TANDEM_DEVICE const u16* gate_row(const ForwardParams& p, const TileIndex& t, int query, int head) {
  const auto& of = static_cast<const ForwardParamsWithGate&>(p);
  const i64 row = t.begin_q + static_cast<i64>(query);
  return static_cast<const u16*>(of.gate) + (p.packed_q ? 0 : t.batch) * of.gate_stride.batch +
         head * of.gate_stride.head + row * of.gate_stride.row;
}

/// The sigmoid of the gate of one element.
template <Tiling T>
TANDEM_DEVICE float gate_at(const ForwardParams& p, const TileIndex& t, int query, int head, int col) {
  return sigmoid_of(ptx::unpack<T.element>(ptx::load_global(gate_row(p, t, query, head) + col)));
}

/// Groups of 32 columns of a row whose gates are loaded together: a part of the row, so that ptxas
/// (NVRTC 13.0) has registers for it beside O.
template <int columns>
constexpr int gated_groups = columns % 96 == 0 ? 3 : columns / 32;

/// Multiplies accumulators of a row, of which a thread has two of every four from the `first` on, and so two
/// columns of every eight, by the sigmoids of their gates. `left`: columns there are from `gate` on; 0 of a
/// row without a result, whose gates may be anything. `pairs`: two are loaded as one word, not through the
/// read-only cache: loads through that pass the stores of what was gated before.
template <Element element, int groups, int n>
TANDEM_DEVICE void multiply_by_gates(float (&o)[n], int first, const u16* gate, int left, bool pairs) {
  u32 words[4 * groups];
#pragma unroll
  for (int j = 0; j < 4 * groups; ++j) {
    words[j] = 0;
    if (pairs) {
      if (8 * j < left) words[j] = ptx::load_written(reinterpret_cast<const u32*>(gate + 8 * j));
    } else {
      if (8 * j < left) words[j] = ptx::load_written(gate + 8 * j);
      if (8 * j + 1 < left) words[j] |= static_cast<u32>(ptx::load_written(gate + 8 * j + 1)) << 16;
    }
  }
#pragma unroll
  for (int j = 0; j < 4 * groups; ++j) {
    o[first + 4 * j] *= sigmoid_of(unpack_low<element>(words[j]));
    o[first + 4 * j + 1] *= sigmoid_of(unpack_high<element>(words[j]));
  }
}

}  // namespace tandem::tile
