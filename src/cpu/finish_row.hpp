// The two ends of a query row that every forward kernel shares: which keys it sees, and what becomes of its
// sums.
#pragma once

#include "cpu/forward_tile.hpp"
#include "cpu/simd/math.hpp"

namespace tandem::cpu::TANDEM_TARGET {

constexpr float negative_infinity = -__builtin_inff();

/// Keys [begin, end) of the sequence.
struct RowKeys {
  std::int64_t begin;
  std::int64_t end;
};

/// tandem::visible_keys for kernels.
TANDEM_INLINE RowKeys row_keys(const ForwardTile& t, std::int64_t row) {
  const std::int64_t diagonal = row + t.seqlen_k - t.seqlen_q;
  const std::int64_t begin = t.window_left >= 0 ? diagonal - t.window_left : 0;
  const std::int64_t end = t.window_right >= 0 ? diagonal + t.window_right + 1 : t.seqlen_k;
  return {begin > 0 ? begin : 0, end < t.seqlen_k ? end : t.seqlen_k};
}

/// What O must be multiplied by, and the row's LSE, once every key has been seen.
struct Finish {
  float scale;
  float lse;
};

TANDEM_INLINE Finish finish_row(float maximum, float sum, const float* sink, float v_scale) {
  float top = maximum;
  float denominator = sum;
  float numerator = 1.0F;
  if (sink != nullptr) {
    const float logit = *sink * log2_e;
    top = logit > maximum ? logit : maximum;
    numerator = maximum == top ? 1.0F : __builtin_exp2f(maximum - top);
    denominator = sum * numerator + (logit == top ? 1.0F : __builtin_exp2f(logit - top));
  }
  Finish f;
  f.scale = numerator * v_scale / denominator;
  // Only logits that are all -inf leave 0 here: their softmax is 0 / 0.
  f.lse =
      denominator == 0.0F
          ? __builtin_nanf("")
          : static_cast<float>(static_cast<double>(top) * 0.693147180559945309 + __builtin_log(denominator));
  return f;
}

}  // namespace tandem::cpu::TANDEM_TARGET
