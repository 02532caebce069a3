// exp2, tanh and log by lanes.
#pragma once

#include "cpu/simd/vec.hpp"
#include "problem/recipe.hpp"

namespace tandem::cpu::TANDEM_TARGET {

constexpr float log2_e = 1.44269504088896341F;
constexpr double ln_2 = 0.693147180559945309;

namespace detail {

/// The coefficients of 2^f for f in [0, 1), highest first: minimax of degree 5 on the relative error, 8.2e-8
/// (1.4e-7 with rounding); exactly 1 at 0.
constexpr float exp2_coefficients[6] = {0.0018671300495043397F, 0.009017030708491802F, 0.05579991266131401F,
                                        0.24016444385051727F,   0.6931512951850891F,   1.0F};

TANDEM_INLINE Vec exp2_fraction(Vec f) {
  Vec p = broadcast(exp2_coefficients[0]);
  p = hn::MulAdd(p, f, broadcast(exp2_coefficients[1]));
  p = hn::MulAdd(p, f, broadcast(exp2_coefficients[2]));
  p = hn::MulAdd(p, f, broadcast(exp2_coefficients[3]));
  p = hn::MulAdd(p, f, broadcast(exp2_coefficients[4]));
  return hn::MulAdd(p, f, broadcast(exp2_coefficients[5]));
}

/// 2^f - 1 for f in [0, 1): minimax on its own relative error, 1.3e-8 before rounding, so that it is right
/// near 0 too.
TANDEM_INLINE Vec exp2_fraction_minus_one(Vec f) {
  Vec p = broadcast(0.0002074557705782354F);
  p = hn::MulAdd(p, f, broadcast(0.0012710057199001312F));
  p = hn::MulAdd(p, f, broadcast(0.00965065136551857F));
  p = hn::MulAdd(p, f, broadcast(0.055496565997600555F));
  p = hn::MulAdd(p, f, broadcast(0.2402271330356598F));
  p = hn::MulAdd(p, f, broadcast(0.6931471824645996F));
  return hn::Mul(p, f);
}

/// 2^n for whole n in [-126, 128]; 128 gives infinity.
TANDEM_INLINE Vec exp2_whole(Vec n) {
  const auto biased = hn::Add(hn::ConvertTo(i32_lanes, n), hn::Set(i32_lanes, 127));
  return hn::BitCast(f32_lanes, hn::ShiftLeft<23>(biased));
}

}  // namespace detail

/// 2^x to 1.5e-7 relative, for every x: exp2(0) is 1, exp2(-inf) is 0, what overflows is infinite, NaN stays
/// NaN. Results below 2^-126 may be flushed to 0.
TANDEM_INLINE Vec exp2(Vec x) {
#if HWY_TARGET <= HWY_AVX3
  // vreduceps leaves x - floor(x) (0 for infinities) and vscalefps multiplies by 2^floor(x): no clamps, no
  // shifts.
  const Vec f{_mm512_reduce_ps(x.raw, 0x09)};
  return Vec{_mm512_scalef_ps(detail::exp2_fraction(f).raw, x.raw)};
#else
  const Vec clamped = hn::Min(hn::Max(x, broadcast(-126.0F)), broadcast(128.0F));
  const Vec n = hn::Floor(clamped);
  const Vec power = hn::Mul(detail::exp2_fraction(hn::Sub(clamped, n)), detail::exp2_whole(n));
  // Targets differ in what a clamp makes of NaN; here x itself stands for it.
  return hn::IfThenElse(hn::Eq(x, x), hn::IfThenZeroElse(hn::Lt(x, broadcast(-126.0F)), power), x);
#endif
}

#if HWY_TARGET <= HWY_AVX3
/// x[i] = 2^x[i] by a polynomial of their fractions, the highest coefficient first, step by step for all. One
/// after the other, their instructions fill the scheduler of an Intel core and wait there: 8.3 cycles a
/// register where four side by side take 6.0 and the units 5.5.
template <int terms, int n>
TANDEM_INLINE void exp2_by(const float (&coefficients)[terms], Vec (&x)[n]) {
  Vec f[n];
  Vec p[n];
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) f[i] = Vec{_mm512_reduce_ps(x[i].raw, 0x09)};
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) p[i] = broadcast(coefficients[0]);
#pragma GCC unroll 8
  for (int k = 1; k < terms; ++k) {
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) p[i] = hn::MulAdd(p[i], f[i], broadcast(coefficients[k]));
  }
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) x[i] = Vec{_mm512_scalef_ps(p[i].raw, x[i].raw)};
}
#endif

/// x[i] = exp2(x[i]).
template <int n>
TANDEM_INLINE void exp2_all(Vec (&x)[n]) {
#if HWY_TARGET <= HWY_AVX3
  exp2_by(detail::exp2_coefficients, x);
#else
  for (Vec& v : x) v = exp2(v);
#endif
}

/// 2^x as recipe.hpp's takes_linear_exp2 has it: linear within an octave. 0 below 2^-127; NaN stays.
TANDEM_INLINE Vec linear_exp2(Vec x) {
  constexpr float one = 1 << linear_exp2_bits;
  const Vec zero_bits = broadcast(127.0F * one - linear_exp2_offset);
  const Vec bits =
      hn::Min(hn::Max(hn::MulAdd(x, broadcast(one), zero_bits), zero()), broadcast(255.0F * one));
  const Vec power = hn::BitCast(f32_lanes, hn::ShiftLeft<23 - linear_exp2_bits>(hn::NearestInt(bits)));
  return hn::IfThenElse(hn::Eq(x, x), power, x);
}

/// tanh(x) to 4e-7 relative, also near 0: with y = 2x log2(e), e = 2^y - 1 computed without cancellation, e /
/// (e + 2).
TANDEM_INLINE Vec tanh(Vec x) {
  const Vec y = hn::Mul(hn::Abs(x), broadcast(2.0F * log2_e));
  const Vec clamped = hn::Min(y, broadcast(32.0F));  // tanh is 1 to the last bit long before, at x = 9
  const Vec n = hn::Floor(clamped);
  const Vec power = detail::exp2_whole(n);
  const Vec fraction = detail::exp2_fraction_minus_one(hn::Sub(clamped, n));
  const Vec e = hn::MulAdd(fraction, power, hn::Sub(power, broadcast(1.0F)));
  const Vec t = hn::CopySign(hn::Div(e, hn::Add(e, broadcast(2.0F))), x);
  return hn::IfThenElse(hn::Eq(x, x), t, x);
}

/// log(x) to 2e-7 relative: x = m * 2^e with m within a factor sqrt(2) of 1, and log(m) = 2 atanh(z) of z =
/// (m - 1) / (m + 1), whose series is z^11 / 5.5 = 7e-10 off after five terms. log(0) is -inf, of less NaN.
TANDEM_INLINE Vec natural_log(Vec x) {
  const auto tiny = hn::Lt(x, broadcast(0x1p-126F));
  const IVec bits = hn::BitCast(i32_lanes, hn::IfThenElse(tiny, hn::Mul(x, broadcast(0x1p24F)), x));
  // Bits of m in [sqrt(1/2), sqrt(2)): counted from those of sqrt(1/2).
  const IVec from_root = hn::Sub(bits, hn::Set(i32_lanes, 0x3F3504F3));
  const IVec exponent = hn::ShiftRight<23>(from_root);
  const Vec m = hn::BitCast(f32_lanes, hn::Sub(bits, hn::ShiftLeft<23>(exponent)));
  const Vec e = hn::Sub(hn::ConvertTo(f32_lanes, exponent), hn::IfThenElseZero(tiny, broadcast(24.0F)));
  const Vec z = hn::Div(hn::Sub(m, broadcast(1.0F)), hn::Add(m, broadcast(1.0F)));
  const Vec z2 = hn::Mul(z, z);
  Vec p = broadcast(2.0F / 9.0F);
  p = hn::MulAdd(p, z2, broadcast(2.0F / 7.0F));
  p = hn::MulAdd(p, z2, broadcast(2.0F / 5.0F));
  p = hn::MulAdd(p, z2, broadcast(2.0F / 3.0F));
  // ln 2 in two parts, the first short enough for exact products with e.
  const Vec low = hn::MulAdd(e, broadcast(1.42860677e-6F), hn::Mul(hn::Mul(p, z2), z));
  const Vec y = hn::MulAdd(e, broadcast(0.693145752F), hn::Add(hn::Add(z, z), low));
  const Vec infinity = broadcast(__builtin_inff());
  const Vec edge = hn::IfThenElse(hn::Eq(x, zero()), hn::Neg(infinity),
                                  hn::IfThenElse(hn::Eq(x, infinity), x, broadcast(__builtin_nanf(""))));
  return hn::IfThenElse(hn::And(hn::Gt(x, zero()), hn::Lt(x, infinity)), y, edge);
}

}  // namespace tandem::cpu::TANDEM_TARGET
