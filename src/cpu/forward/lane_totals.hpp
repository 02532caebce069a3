// Sums over many keys, of query rows that lie in lanes.
//
// A sum of n terms of one sign in f32 may lose n / 2 units in its last place: 3e-5 of it at 1000 terms, 3 %
// at a million. So a block of keys has a sum of its own, blocks are added up over a run of run_keys keys, and
// runs in f64: at most 128 / 2 + 32 / 2 units are lost, however many keys there are, and what it costs is an
// addition a block.
#pragma once

#include "cpu/forward/tile.hpp"
#include "cpu/simd/math.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// The runs added up so far of a stripe's rows, and the maximum that they are relative to.
struct LaneTotals {
  double* out = nullptr;  ///< [head_dim_v][lanes]
  double* sum = nullptr;
  float* maximum = nullptr;
};

/// The totals of the stripe that starts at row `row` of `rows`.
TANDEM_INLINE LaneTotals totals_at(std::byte* memory, int rows, int row, int dims) {
  auto* const out = reinterpret_cast<double*>(memory);
  double* const sum = out + static_cast<std::int64_t>(rows) * dims;
  auto* const maximum = reinterpret_cast<float*>(sum + rows);
  return {out + static_cast<std::int64_t>(row) * dims, sum + row, maximum + row};
}

template <int lanes>
void open_totals(const LaneTotals& t, int dims) {
  for (int i = 0; i < lanes; ++i) {
    t.sum[i] = 0.0;
    t.maximum[i] = -__builtin_inff();
  }
  __builtin_memset(t.out, 0, static_cast<std::size_t>(dims) * lanes * sizeof(double));
}

/// Adds a run's O, sum and maximum to the totals, and clears O and sum. exponent(from, to) is the power of
/// two that sums relative to the maximum `from` have relative to `to`.
template <int lanes, typename Exponent>
[[gnu::noinline]] void fold_run(const LaneTotals& t, int dims, float* out, float* sum, const float* maximum,
                                const Exponent& exponent) {
  float weight_total[lanes];
  float weight_run[lanes];
  // Two infinities have no difference.
  const auto weight = [&](Vec from, Vec to) {
    return hn::IfThenElse(hn::Eq(from, to), broadcast(1.0F), exp2(exponent(from, to)));
  };
  for (int i = 0; i < lanes; i += vec_lanes) {
    const Vec old = load(t.maximum + i);
    const Vec now = load(maximum + i);
    const Vec top = hn::Max(old, now);
    store(weight(old, top), weight_total + i);
    store(weight(now, top), weight_run + i);
    store(top, t.maximum + i);
  }
  const auto add = [&](double* total, float* run) __attribute__((always_inline)) {
    for (int i = 0; i < lanes; ++i) {
      total[i] = total[i] * static_cast<double>(weight_total[i]) +
                 static_cast<double>(run[i]) * static_cast<double>(weight_run[i]);
      run[i] = 0.0F;
    }
  };
  add(t.sum, sum);
  for (int c = 0; c < dims; ++c) add(t.out + c * lanes, out + c * lanes);
}

/// The totals as O and sum, rounded to f32, and their maximum.
template <int lanes>
void close_totals(const LaneTotals& t, int dims, float* out, float* sum, float* maximum) {
  for (int i = 0; i < lanes; ++i) {
    sum[i] = static_cast<float>(t.sum[i]);
    maximum[i] = t.maximum[i];
  }
  for (int i = 0; i < dims * lanes; ++i) out[i] = static_cast<float>(t.out[i]);
}

}  // namespace tandem::cpu::TANDEM_TARGET
