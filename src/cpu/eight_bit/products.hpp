// The two products of a block in 8 bits, computed with the roundings of the GPU's accumulators.
#pragma once

#include "cpu/eight_bit/work.hpp"
#include "cpu/simd/product.hpp"

namespace tandem::cpu::TANDEM_TARGET::eight_bit {

TANDEM_INLINE Vec truncate(Vec x) {
  return bits_as_f32(hn::And(f32_as_bits(x), hn::Set(u32_lanes, e4m3_accumulator_mask)));
}

/// Rows of a register tile: 16 accumulators, or as many as half of 16 registers.
constexpr int register_rows = vec_registers == 32 ? 16 / stripe_vecs : 4;

template <int rows>
TANDEM_INLINE void multiply(Vec (&acc)[rows][stripe_vecs], const float* words, std::int64_t row_stride,
                            std::int64_t depth_stride, const float* lanes, int depth, bool truncates) {
  const int step = truncates ? e4m3_depth_step : depth;
  for (int c = 0; c < depth; c += step) {
    const int n = depth - c < step ? depth - c : step;
    multiply_tile<F32Math, rows, stripe_vecs>(acc, words + c * depth_stride, row_stride, depth_stride,
                                              lanes + c * stripe_lanes, stripe_lanes, n);
    if (!truncates) continue;
    for (auto& row : acc) {
      for (Vec& a : row) a = truncate(a);
    }
  }
}

template <int rows>
TANDEM_INLINE void score_rows(const Work& w, const float* q, int key) {
  Vec acc[rows][stripe_vecs];
  for (auto& row : acc) {
    for (Vec& a : row) a = zero();
  }
  const int dim = w.t.head_dim_qk;
  multiply<rows>(acc, w.s.k + static_cast<std::int64_t>(key) * dim, dim, 1, q, dim, w.truncates);
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < stripe_vecs; ++v) {
      store(acc[r][v], w.s.scores + (key + r) * stripe_lanes + v * vec_lanes);
    }
  }
}

/// S^T = K Q^T, sums of products of quantized values.
[[gnu::noinline]] inline void score(const Work& w, const float* q, int count) {
  int j = 0;
  for (; j + register_rows <= count; j += register_rows) score_rows<register_rows>(w, q, j);
  for (; j < count; ++j) score_rows<1>(w, q, j);
}

template <int rows>
TANDEM_INLINE void accumulate_rows(const Work& w, const Stripe& stripe, const KeyBlock& b, int channel) {
  const std::int64_t at = (static_cast<std::int64_t>(stripe.index) * w.t.head_dim_v + channel) * stripe_lanes;
  const int row = stripe.index * stripe_lanes;
  Vec acc[rows][stripe_vecs];
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < stripe_vecs; ++v) {
      acc[r][v] = zero();
      if (b.opens) continue;
      const Vec ratio = hn::Mul(load(w.s.growth + row + v * vec_lanes), broadcast(w.s.v_ratio[channel + r]));
      acc[r][v] = hn::Mul(load(w.s.held + at + r * stripe_lanes + v * vec_lanes), ratio);
    }
  }
  multiply<rows>(acc, w.s.v + channel, 1, w.t.head_dim_v, w.s.scores, b.count, w.truncates);
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < stripe_vecs; ++v) {
      const std::int64_t lane = at + r * stripe_lanes + v * vec_lanes;
      if (!b.closes) {
        store(acc[r][v], w.s.held + lane);
        continue;
      }
      const Vec factor =
          hn::Mul(load(w.s.factor + row + v * vec_lanes), broadcast(w.s.v_reference[channel + r]));
      const Vec kept = hn::Mul(load(w.s.out + lane), load(w.s.pending + row + v * vec_lanes));
      store(hn::MulAdd(acc[r][v], factor, kept), w.s.out + lane);
    }
  }
}

/// O^T = O^T * growth + V^T P^T, by way of what the tensor cores hold.
[[gnu::noinline]] inline void accumulate(const Work& w, const Stripe& stripe, const KeyBlock& b) {
  int c = 0;
  for (; c + register_rows <= w.t.head_dim_v; c += register_rows)
    accumulate_rows<register_rows>(w, stripe, b, c);
  for (; c < w.t.head_dim_v; ++c) accumulate_rows<1>(w, stripe, b, c);
  if (!b.closes) return;
  for (int i = 0; i < stripe_lanes; ++i) w.s.pending[stripe.index * stripe_lanes + i] = 1.0F;
}

}  // namespace tandem::cpu::TANDEM_TARGET::eight_bit
