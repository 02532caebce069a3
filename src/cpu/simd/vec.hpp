// The vector vocabulary of the CPU kernels: one register of f32 lanes, and loads and stores that convert.
//
// A source that includes this is compiled once for each instruction set (src/cpu/targets/targets.cmake), each
// time with TANDEM_TARGET naming the namespace that its code lives in. Such a source must not emit inline
// functions or template instances of any other namespace (std::max at -O0, say): the linker would keep one
// copy for every caller, perhaps one that this processor cannot run. Plain structs, builtins, always-inlined
// functions and C functions are fine.
#pragma once

#include <hwy/highway.h>

#include <cstdint>

#include "cpu/common/convert.hpp"

#define TANDEM_INLINE [[gnu::always_inline]] static inline

namespace tandem::cpu::TANDEM_TARGET {

namespace hn = hwy::HWY_NAMESPACE;

using Lanes = hn::ScalableTag<float>;
using ULanes = hn::RebindToUnsigned<Lanes>;
using ILanes = hn::RebindToSigned<Lanes>;
using Vec = hn::Vec<Lanes>;
using UVec = hn::Vec<ULanes>;
using IVec = hn::Vec<ILanes>;
using Mask = hn::Mask<Lanes>;

constexpr Lanes f32_lanes{};
constexpr ULanes u32_lanes{};
constexpr ILanes i32_lanes{};

/// f32 numbers in a register: 16 (AVX-512), 8 (AVX2) or 4.
constexpr int vec_lanes = static_cast<int>(hn::MaxLanes(f32_lanes));
/// Registers that the compiler can hold accumulators and operands in.
constexpr int vec_registers = vec_lanes == 16 || HWY_ARCH_ARM ? 32 : 16;

TANDEM_INLINE Vec zero() {
  return hn::Zero(f32_lanes);
}
TANDEM_INLINE Vec broadcast(float x) {
  return hn::Set(f32_lanes, x);
}
TANDEM_INLINE Vec bits_as_f32(UVec bits) {
  return hn::BitCast(f32_lanes, bits);
}
TANDEM_INLINE UVec f32_as_bits(Vec v) {
  return hn::BitCast(u32_lanes, v);
}

/// Loads vec_lanes consecutive elements from any address and widens them to f32, exactly.
TANDEM_INLINE Vec load(const float* p) {
  return hn::LoadU(f32_lanes, p);
}

TANDEM_INLINE Vec load(const bf16* p) {
  const hn::Rebind<std::uint16_t, Lanes> half;
  const auto bits = hn::LoadU(half, reinterpret_cast<const std::uint16_t*>(p));
  return bits_as_f32(hn::ShiftLeft<16>(hn::PromoteTo(u32_lanes, bits)));
}

TANDEM_INLINE Vec load(const f16* p) {
#if HWY_TARGET == HWY_EMU128  // its conversion knows neither infinity nor NaN
  alignas(16) float widened[vec_lanes];
  for (int i = 0; i < vec_lanes; ++i) widened[i] = to_f32(p[i]);
  return hn::Load(f32_lanes, widened);
#else
  const hn::Rebind<std::uint16_t, Lanes> half;
  const hn::Rebind<hwy::float16_t, Lanes> half_float;
  const auto bits = hn::LoadU(half, reinterpret_cast<const std::uint16_t*>(p));
  return hn::PromoteTo(f32_lanes, hn::BitCast(half_float, bits));
#endif
}

TANDEM_INLINE Vec load(const s8* p) {
  const hn::Rebind<std::int8_t, Lanes> quarter;
  const auto value = hn::LoadU(quarter, reinterpret_cast<const std::int8_t*>(p));
  return hn::ConvertTo(f32_lanes, hn::PromoteTo(i32_lanes, value));
}

TANDEM_INLINE Vec load(const e4m3* p) {
#if HWY_TARGET == HWY_EMU128  // its conversion from f16 knows no NaN
  const hn::Rebind<std::uint8_t, Lanes> quarter;
  const auto code = hn::PromoteTo(u32_lanes, hn::LoadU(quarter, reinterpret_cast<const std::uint8_t*>(p)));
  const auto magnitude = hn::And(code, hn::Set(u32_lanes, 0x7FU));
  const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(u32_lanes, 0x80U)));
  const auto normal = hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(u32_lanes, 120U << 23));
  const auto subnormal =
      f32_as_bits(hn::Mul(hn::ConvertTo(f32_lanes, hn::BitCast(i32_lanes, magnitude)), broadcast(0x1p-9F)));
  const auto small = hn::Lt(hn::BitCast(i32_lanes, magnitude), hn::Set(i32_lanes, 8));
  const auto not_a_number = hn::Eq(magnitude, hn::Set(u32_lanes, 0x7FU));
  auto bits = hn::IfThenElse(hn::RebindMask(u32_lanes, small), subnormal, normal);
  bits = hn::IfThenElse(not_a_number, hn::Set(u32_lanes, 0x7FC00000U), bits);
  return bits_as_f32(hn::Or(bits, sign));
#else
  // As f16 with the same fields the value is 2^-8 of what it should be, subnormals included. All ones are an
  // e4m3's NaN, but a number in f16.
  const hn::Rebind<std::int8_t, Lanes> quarter;
  const hn::Rebind<std::int16_t, Lanes> half;
  const hn::Rebind<hwy::float16_t, Lanes> half_float;
  const auto code = hn::PromoteTo(half, hn::LoadU(quarter, reinterpret_cast<const std::int8_t*>(p)));
  const auto magnitude = hn::Set(half, 0x3F80);
  const auto bits = hn::ShiftLeft<7>(code);  // the sign is in both upper bits
  const auto is_nan = hn::Eq(hn::And(bits, magnitude), magnitude);
  const auto value = hn::Or(hn::And(bits, hn::Set(half, static_cast<std::int16_t>(0xBF80))),
                            hn::IfThenElseZero(is_nan, hn::Set(half, 0x7E00)));
  return hn::Mul(hn::PromoteTo(f32_lanes, hn::BitCast(half_float, value)), broadcast(256.0F));
#endif
}

/// Rounds every lane to bf16 (nearest, ties to even, NaN kept) and leaves the 16 bits in the lower half of
/// each lane.
TANDEM_INLINE UVec round_to_bf16(Vec v) {
  const auto bits = f32_as_bits(v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u32_lanes, 1U));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(u32_lanes, 0x7FFFU))));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(u32_lanes, 0x40U));
  return hn::IfThenElse(hn::RebindMask(u32_lanes, hn::Ne(v, v)), quiet, rounded);
}

/// Stores vec_lanes consecutive elements at any address, rounding to nearest, ties to even.
TANDEM_INLINE void store(Vec v, float* p) {
  hn::StoreU(v, f32_lanes, p);
}

TANDEM_INLINE void store(Vec v, bf16* p) {
  const hn::Rebind<std::uint16_t, Lanes> half;
  const auto bits =
      hn::BitCast(i32_lanes, round_to_bf16(v));  // below 2^16, so that the narrowing never saturates
  hn::StoreU(hn::DemoteTo(half, bits), half, reinterpret_cast<std::uint16_t*>(p));
}

TANDEM_INLINE void store(Vec v, f16* p) {
#if HWY_TARGET == HWY_EMU128  // its conversion truncates
  alignas(16) float source[vec_lanes];
  hn::Store(v, f32_lanes, source);
  for (int i = 0; i < vec_lanes; ++i) p[i] = from_f32<f16>(source[i]);
#else
  const hn::Rebind<hwy::float16_t, Lanes> half_float;
  const hn::Rebind<std::uint16_t, Lanes> half;
  hn::StoreU(hn::BitCast(half, hn::DemoteTo(half_float, v)), half, reinterpret_cast<std::uint16_t*>(p));
#endif
}

/// The first `n` (below vec_lanes) elements; the other lanes are 0. Touches no memory past them.
template <typename T>
TANDEM_INLINE Vec load_first(const T* p, int n) {
  T buffer[vec_lanes] = {};
  __builtin_memcpy(buffer, p, static_cast<unsigned long>(n) * sizeof(T));
  return load(buffer);
}

/// Stores the first `n` (below vec_lanes) lanes and nothing past them.
template <typename T>
TANDEM_INLINE void store_first(Vec v, T* p, int n) {
  T buffer[vec_lanes];
  store(v, buffer);
  __builtin_memcpy(p, buffer, static_cast<unsigned long>(n) * sizeof(T));
}

}  // namespace tandem::cpu::TANDEM_TARGET
