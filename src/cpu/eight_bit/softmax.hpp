// The online softmax of a block in 8 bits: from sums of products to rounded P.
#pragma once

#include "cpu/eight_bit/work.hpp"
#include "cpu/forward/finish_row.hpp"
#include "cpu/simd/round.hpp"

namespace tandem::cpu::TANDEM_TARGET::eight_bit {

/// P, times its range, as the second product takes it.
TANDEM_INLINE Vec round_p(const Work& w, Vec x) {
  switch (w.tile.recipe.pv) {
    case OperandType::e4m3: return round_to_e4m3(x);
    case OperandType::s8: return round_whole(x);
    default: return w.t.dtype == DType::f16 ? round_to_f16(x) : round_to_bf16_value(x);
  }
}

/// 2^x, linear within an octave where P in its range is.
TANDEM_INLINE Vec linear_p(Vec x) {
  return hn::Mul(linear_exp2(hn::Add(x, broadcast(e4m3_lazy_p_range_log2))),
                 broadcast(1.0F / e4m3_lazy_p_range));
}

/// Keys [first, last) of a block that the rows of a register see.
struct SeenKeys {
  IVec first;
  IVec last;

  [[gnu::always_inline]] Mask at(int key) const {
    const IVec k = hn::Set(i32_lanes, key);
    return hn::RebindMask(f32_lanes, hn::AndNot(hn::Lt(k, first), hn::Lt(k, last)));
  }
};

TANDEM_INLINE SeenKeys seen_keys(const Stripe& stripe, const KeyBlock& b, int lane) {
  std::int32_t first[vec_lanes];
  std::int32_t last[vec_lanes];
  for (int i = 0; i < vec_lanes; ++i) {
    const std::int64_t f = stripe.first[lane + i] - b.begin;
    const std::int64_t l = stripe.last[lane + i] - b.begin;
    first[i] = f < 0 ? 0 : (f > b.count ? b.count : static_cast<std::int32_t>(f));
    last[i] = l < 0 ? 0 : (l > b.count ? b.count : static_cast<std::int32_t>(l));
  }
  return {hn::LoadU(i32_lanes, first), hn::LoadU(i32_lanes, last)};
}

/// A sum of products: whole numbers where a matrix unit made them.
TANDEM_INLINE Vec load_products(const Work& w, const float* at) {
  if (has_matrix_unit && w.tile.on_unit)
    return hn::ConvertTo(f32_lanes, hn::LoadU(i32_lanes, reinterpret_cast<const std::int32_t*>(at)));
  return load(at);
}

/// Sums of quantized values to logits times log2(e), in place; returns the largest by lane.
TANDEM_INLINE Vec finish_logits(const Work& w, const Stripe& stripe, const KeyBlock& b, int lane, bool masked,
                                float* scores) {
  const ForwardTile& t = w.t;
  const int row = stripe.index * stripe_lanes + lane;
  const Vec q_scale = load(w.s.q_scale + row);
  const Vec shift = load(w.s.shift + row);
  const SeenKeys seen = seen_keys(stripe, b, lane);
  Vec maximum = broadcast(negative_infinity);
  for (int j = 0; j < b.count; ++j) {
    float* const at = scores + j * stripe_lanes + lane;
    Vec x = hn::Mul(load_products(w, at),
                    hn::Mul(q_scale, broadcast(scale_of_row(w.tile.k_scales[b.begin + j]))));
    if (t.softcap != 0.0F) {
      x = hn::Mul(tanh(hn::Mul(hn::Add(x, shift), broadcast(1.0F / t.softcap))),
                  broadcast(t.softcap * log2_e));
    }
    if (masked) x = hn::IfThenElse(seen.at(j), x, broadcast(negative_infinity));
    store(x, at);
    maximum = hn::Max(x, maximum);
  }
  return maximum;
}

TANDEM_INLINE Vec zero_if_infinite(Vec maximum) {
  return hn::IfThenZeroElse(hn::Eq(maximum, broadcast(negative_infinity)), maximum);
}

/// What a block does to the sums of a register of rows, once its largest logits are known.
struct Rescaling {
  Vec maximum;  ///< the running one, this block's keys included
  Vec growth;   ///< what the sums before are multiplied by
  Vec base;     ///< P of this block is 2^(s - base)
  Vec weight;   ///< and this block's sums
};

TANDEM_INLINE Rescaling rescale(const Work& w, int row, Vec in_tile) {
  const Vec old = load(w.s.maximum + row);
  store(hn::Max(in_tile, load(w.s.largest + row)), w.s.largest + row);
  const auto above = hn::Gt(in_tile, hn::Add(old, broadcast(w.lazy_rescaling ? lazy_headroom_log2 : 0.0F)));
  const Vec maximum = hn::IfThenElse(above, in_tile, old);
  const Vec safe = zero_if_infinite(maximum);
  return {maximum, exp2(hn::Sub(old, safe)), w.lazy_rescaling ? safe : zero_if_infinite(in_tile),
          w.lazy_rescaling ? broadcast(1.0F) : exp2(hn::Sub(in_tile, safe))};
}

/// Brings a register's rows up to date: `sum` of P before rounding, which was rounded in units of `unit`.
TANDEM_INLINE void add_block(const Work& w, int row, const Rescaling& r, Vec sum, Vec unit) {
  store(r.maximum, w.s.maximum + row);
  store(hn::MulAdd(load(w.s.sum + row), r.growth, hn::Mul(sum, r.weight)), w.s.sum + row);
  store(r.growth, w.s.growth + row);
  store(hn::Mul(load(w.s.pending + row), r.growth), w.s.pending + row);
  store(hn::Mul(unit, r.weight), w.s.factor + row);
}

/// Logits to rounded P in place, with the row's maximum, sum and factors brought up to date.
[[gnu::noinline]] inline void soften(const Work& w, const Stripe& stripe, const KeyBlock& b, int lane,
                                     bool masked, float* scores) {
  const int row = stripe.index * stripe_lanes + lane;
  const Vec in_tile = finish_logits(w, stripe, b, lane, masked, scores);
  const Rescaling r = rescale(w, row, in_tile);
  const bool by_row = w.tile.recipe.v_scales == ScaleGroup::row;
  const float range = w.tile.recipe.pv == OperandType::e4m3
                          ? (w.lazy_rescaling ? e4m3_lazy_p_range : e4m3_p_range)
                          : u8_p_range;
  Vec sum = zero();
  Vec largest = zero();
  for (int j = 0; j < b.count; ++j) {
    float* const at = scores + j * stripe_lanes + lane;
    const Vec x = hn::Sub(load(at), r.base);
    const Vec p = w.p_linear && takes_linear_exp2(j) ? linear_p(x) : exp2(x);
    sum = hn::Add(sum, p);
    if (by_row) {  // V's scale joins P before it is rounded
      const Vec scaled = hn::Mul(p, broadcast(w.tile.v_scales[b.begin + j]));
      largest = hn::Max(scaled, largest);
      store(scaled, at);
    } else {
      store(round_p(w, hn::Mul(p, broadcast(range))), at);
    }
  }
  Vec unit = broadcast(1.0F / range);
  if (by_row) {
    const auto some = hn::Gt(largest, zero());
    const Vec inverse = hn::IfThenElseZero(some, hn::Div(broadcast(range), largest));
    for (int j = 0; j < b.count; ++j) {
      float* const at = scores + j * stripe_lanes + lane;
      store(round_p(w, hn::Mul(load(at), inverse)), at);
    }
    unit = hn::Mul(unit, largest);
  }
  add_block(w, row, r, sum, unit);
}

}  // namespace tandem::cpu::TANDEM_TARGET::eight_bit
