// What a short query adds up: maximum, sum and O of its rows, by runs of keys in f32 and over runs in f64.
#pragma once

#include "cpu/common/logits.hpp"
#include "cpu/simd/math.hpp"

namespace tandem::cpu::TANDEM_TARGET {

constexpr int padded(int columns) {
  return (columns + vec_lanes - 1) / vec_lanes * vec_lanes;
}

/// A view of a partial result, or of the sums of a run: maximum[rows], sum[rows], out[rows][head_dim_v].
template <typename Float>
struct PartialView {
  Float* maximum;
  Float* sum;
  Float* out;
};
using RunSums = PartialView<float>;

template <typename Float>
TANDEM_INLINE PartialView<Float> partial_at(Float* data, int rows) {
  return {data, data + rows, data + 2 * rows};
}

/// Transforms the scores of a row, which is padded to whole registers.
TANDEM_INLINE void transform_row(float* s, int count, const Logits& logits) {
  for (int j = 0; j < count; j += vec_lanes) store(logits.transform(load(s + j)), s + j);
}

/// Turns one row's scores into weights and brings its maximum and sum up to date; rescale(alpha) does so with
/// its O.
template <typename Rescale>
TANDEM_INLINE void soften_row(float* s, int count, float factor, const RunSums& state, int row,
                              const Rescale& rescale) {
  // Whole registers: what lies past `count` takes part as -inf, with weight 0.
  for (int j = count; j < padded(count); ++j) s[j] = negative_infinity;
  Vec top = broadcast(negative_infinity);
  for (int j = 0; j < count; j += vec_lanes) top = hn::Max(load(s + j), top);
  const float block = hn::GetLane(hn::MaxOfLanes(f32_lanes, top));
  float maximum = state.maximum[row];
  if (block > maximum) {
    const float alpha = __builtin_exp2f((maximum - block) * factor);
    rescale(alpha);
    state.sum[row] *= alpha;
    state.maximum[row] = maximum = block;
  }
  const Vec base = broadcast(maximum == negative_infinity ? 0.0F : maximum);
  Vec sum = zero();
  for (int j = 0; j < count; j += vec_lanes) {
    const Vec p = exp2(hn::Mul(hn::Sub(load(s + j), base), broadcast(factor)));
    store(p, s + j);
    sum = hn::Add(sum, p);
  }
  state.sum[row] += hn::GetLane(hn::SumOfLanes(f32_lanes, sum));
}

/// The sums of no key.
template <typename Float>
TANDEM_INLINE void clear(const PartialView<Float>& sums, int rows, int columns) {
  for (int r = 0; r < rows; ++r) {
    sums.maximum[r] = static_cast<Float>(negative_infinity);
    sums.sum[r] = 0;
  }
  __builtin_memset(sums.out, 0,
                   static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns) * sizeof(Float));
}

/// Adds the sums `b` to `a`.
template <typename Float>
void fold(const ForwardTile& t, const PartialView<double>& a, const PartialView<Float>& b) {
  const auto factor = static_cast<double>(logits_of(t, false).factor);
  for (int r = 0; r < t.count; ++r) {
    const double next = static_cast<double>(b.maximum[r]);
    const double top = a.maximum[r] > next ? a.maximum[r] : next;
    const double base = top == static_cast<double>(negative_infinity) ? 0.0 : top;
    const double weight_a = __builtin_exp2((a.maximum[r] - base) * factor);
    const double weight_b = __builtin_exp2((next - base) * factor);
    a.maximum[r] = top;
    a.sum[r] = a.sum[r] * weight_a + static_cast<double>(b.sum[r]) * weight_b;
    double* out_a = a.out + static_cast<std::int64_t>(r) * t.head_dim_v;
    const auto* out_b = b.out + static_cast<std::int64_t>(r) * t.head_dim_v;
    for (int c = 0; c < t.head_dim_v; ++c) {
      out_a[c] = out_a[c] * weight_a + static_cast<double>(out_b[c]) * weight_b;
    }
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
