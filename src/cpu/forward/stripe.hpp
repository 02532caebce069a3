// What a tile of queries is cut into: stripes of rows, which lie in the lanes, and blocks of keys.
#pragma once

#include "cpu/common/logits.hpp"
#include "cpu/forward/lane_totals.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/simd/product.hpp"

namespace tandem::cpu::TANDEM_TARGET {
/// Registers of lanes in a stripe: a register tile's, 24 accumulators or what 16 registers hold. On a matrix
/// unit it is two tiles' lanes, so that the stripe's Q^T and O^T stay in the first-level cache with scores of
/// 64 keys, while K and V pass from the second in the order in which they lie, at no cost: 32 rows are 1.12
/// to 1.18 times as fast as 64.
template <typename Math>
constexpr int stripe_vecs = on_tiles<Math> ? 2 : (vec_registers == 32 ? 4 : 3);
template <typename Math>
constexpr int stripe_lanes = stripe_vecs<Math>* vec_lanes;

/// Rows of a register tile of that many registers of lanes. A tile of 4 x 4 takes eight loads for 16
/// multiply-adds, one of 6 x 4 ten for 24.
constexpr int tile_rows(int vecs) {
  if (vec_registers != 32) return 4;
  return vecs == 4 ? 6 : 8;
}

/// Consecutive keys of a block that the same registers [first_vec, last_vec) of a stripe see.
struct Segment {
  int begin;
  int end;
  int first_vec;
  int last_vec;
};

/// Keys [begin, begin + count) of the sequence, and where their operands are.
template <typename Math>
struct Block {
  std::int64_t begin = 0;
  int count = 0;
  const typename Math::Word* k;
  std::int64_t k_stride;
  const typename Math::Word* v;
  std::int64_t v_stride;
  const float* k_scales = nullptr;  ///< by key; null: none
  const float* v_scales = nullptr;
};

/// stripe_lanes<Math> stacked query rows: lanes past `count` hold zeros and are never stored.
template <typename Math>
struct Stripe {
  int count;
  int vecs;
  typename Math::Word* q;  ///< [word of head_dim_qk][stripe_lanes]
  float* out;              ///< [head_dim_v][stripe_lanes]
  float* maximum;          ///< the largest score s, capped if there is a softcap
  float* sum;              ///< the sum over the exponentials p
  float* largest;          ///< the largest score itself; null where max_logits are not asked for
  LaneTotals totals;       ///< where sums are in runs
  bool fresh = false;      ///< out is 0, whatever it holds: the first products on tiles write it
  std::int64_t* first_key;
  std::int64_t* last_key;
  std::int64_t begin;  ///< keys [begin, end) are seen by some row ...
  std::int64_t end;
  std::int64_t all_begin;  ///< ... and [all_begin, all_end) by every row
  std::int64_t all_end;
};

/// The stripes of a tile, and the keys [begin, end) that some row of them sees.
template <typename Math>
struct Stripes {
  Stripe<Math> of[max_stripes];
  int count = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Where 2^x is reckoned from, of a register of rows: p = 2^((s - raw) * factor - scaled).
///
/// Where there is a fused multiply-add, raw is 0 and scaled the rounded maximum * factor: one instruction,
/// which does not round s * factor. How far scaled was rounded is in every term of a row and cancels; but it
/// is up to 2^-24 of the exponent, and from logits of 1e9 on 2^x has no room for it. Rows beyond far_exponent
/// have it the other way round, as all have without the instruction: raw is the maximum, scaled 0.
struct Base {
  Vec raw;
  Vec scaled;
  bool far;  ///< raw is not 0 in some row
};

constexpr float far_exponent = HWY_NATIVE_FMA ? 0x1p20F : -1.0F;

TANDEM_INLINE Base base_of(Vec maximum, const Logits& logits) {
  if constexpr (!HWY_NATIVE_FMA) return {maximum, zero(), true};
  const Vec product = hn::Mul(maximum, broadcast(logits.factor));
  // Infinities stay where they are: a row that has seen nothing is no exception.
  const auto far = hn::And(hn::Gt(hn::Abs(product), broadcast(far_exponent)),
                           hn::Lt(hn::Abs(maximum), broadcast(__builtin_inff())));
  return {hn::IfThenElseZero(far, maximum), hn::IfThenZeroElse(far, product), !hn::AllFalse(f32_lanes, far)};
}

/// The exponent that `from` has relative to `to`.
TANDEM_INLINE Vec exponent_between(const Base& from, const Base& to, const Logits& logits) {
  return hn::MulAdd(hn::Sub(from.raw, to.raw), broadcast(logits.factor), hn::Sub(from.scaled, to.scaled));
}

/// The logit that a row's sums are relative to, given its maximum. The maximum's own logit is rounded as the
/// backward pass rounds it: where one key takes a whole row, LSE is that logit.
TANDEM_INLINE double logit_of_base(float maximum, const Logits& logits) {
  const double logit = static_cast<double>(maximum * logits.scale);
  const float scaled = maximum * logits.factor;
  if (__builtin_fabsf(scaled) > far_exponent) return logit;
  const double exact = static_cast<double>(maximum) * static_cast<double>(logits.factor);
  return logit + (static_cast<double>(scaled) - exact) * ln_2;
}

}  // namespace tandem::cpu::TANDEM_TARGET
