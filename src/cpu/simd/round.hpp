// f32 lanes rounded to what narrower formats hold, and kept as f32.
#pragma once

#include "cpu/simd/vec.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// The nearest e4m3 value, ties to even, of 0 <= x <= 448; NaN stays some NaN.
TANDEM_INLINE Vec round_to_e4m3(Vec x) {
  const auto bits = f32_as_bits(x);
  const auto odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(u32_lanes, 1U));
  const auto up = hn::Add(bits, hn::Add(odd, hn::Set(u32_lanes, 0x7FFFFU)));
  const Vec normal = bits_as_f32(hn::And(up, hn::Set(u32_lanes, 0xFFF00000U)));
  const Vec small = hn::Sub(hn::Add(x, broadcast(0x1p14F)), broadcast(0x1p14F));  // multiples of 2^-9
  return hn::IfThenElse(hn::Lt(x, broadcast(0x1p-6F)), small, normal);
}

TANDEM_INLINE Vec round_to_f16(Vec x) {
  f16 stored[vec_lanes];
  store(x, stored);
  return load(stored);
}

TANDEM_INLINE Vec round_to_bf16_value(Vec x) {
  return bits_as_f32(hn::ShiftLeft<16>(round_to_bf16(x)));
}

/// Ties to even, for |x| <= 2^22; NaN stays NaN.
TANDEM_INLINE Vec round_whole(Vec x) {
  return hn::Sub(hn::Add(x, broadcast(0x1.8p23F)), broadcast(0x1.8p23F));
}

}  // namespace tandem::cpu::TANDEM_TARGET
