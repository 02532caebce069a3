// Arithmetic that has an instruction of its own.
#pragma once

#include "config/types.hpp"
#include "ptx/base.cuh"

namespace tandem::ptx {

/// 2^x, relative error 2^-22; -inf gives 0, NaN stays.
TANDEM_DEVICE float exp2(float x) {
#if TANDEM_ON_DEVICE
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return emulator::exp2(x);
#endif
}

TANDEM_DEVICE float log2(float x) {
#if TANDEM_ON_DEVICE
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return emulator::log2(x);
#endif
}

/// 1 / x, relative error 2^-23.
TANDEM_DEVICE float reciprocal(float x) {
#if TANDEM_ON_DEVICE
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return emulator::reciprocal(x);
#endif
}

/// The square root, relative error 2^-22.
TANDEM_DEVICE float square_root(float x) {
#if TANDEM_ON_DEVICE
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return emulator::square_root(x);
#endif
}

/// Functions of the CUDA math library, accurate to 2 ulp, or exact (floor, round to even, fmod).
TANDEM_DEVICE float sine(float x) {
  return ::sinf(x);
}
TANDEM_DEVICE float cosine(float x) {
  return ::cosf(x);
}
TANDEM_DEVICE float error_function(float x) {
  return ::erff(x);
}
TANDEM_DEVICE float log1p(float x) {
  return ::log1pf(x);
}
TANDEM_DEVICE float floor(float x) {
  return ::floorf(x);
}
TANDEM_DEVICE float round(float x) {
  return ::rintf(x);
}
TANDEM_DEVICE float fmod(float x, float y) {
  return ::fmodf(x, y);
}

/// max(min(a + b, most), 0), a + b as it wraps around.
TANDEM_DEVICE i32 add_min_relu(i32 a, i32 b, i32 most) {
#if TANDEM_ON_DEVICE
  i32 y;
  asm("{.reg .s32 sum; add.s32 sum, %1, %2; min.s32.relu %0, sum, %3;}"
      : "=r"(y)
      : "r"(a), "r"(b), "r"(most));
  return y;
#else
  return emulator::add_min_relu(a, b, most);
#endif
}

/// A whole number below 2^24 as f32.
TANDEM_DEVICE float to_float(i32 x) {
#if TANDEM_ON_DEVICE
  return static_cast<float>(x);
#else
  return emulator::to_float(x);
#endif
}

/// Two f32 rounded to nearest even and packed, `low` in bits 0 to 15.
TANDEM_DEVICE u32 pack_bf16(float low, float high) {
#if TANDEM_ON_DEVICE
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return emulator::pack_bf16(low, high);
#endif
}
TANDEM_DEVICE u32 pack_f16(float low, float high) {
#if TANDEM_ON_DEVICE
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return emulator::pack_f16(low, high);
#endif
}

/// sum + 0 * x of two packed elements each: NaN from the first x on that is none or an infinity.
template <Element element>
TANDEM_DEVICE u32 add_zero_times(u32 sum, u32 x) {
#if TANDEM_ON_DEVICE
  u32 y;
  if constexpr (element == Element::bf16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0), "r"(sum));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0), "r"(sum));
  }
  return y;
#else
  return emulator::add_zero_times(sum, x, element);
#endif
}

/// A 16-bit element as f32.
template <Element element>
TANDEM_DEVICE float unpack(u16 bits) {
#if TANDEM_ON_DEVICE
  if constexpr (element == Element::bf16) return __uint_as_float(static_cast<u32>(bits) << 16);
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
#else
  return emulator::unpack(bits, element);
#endif
}

/// Four f32 rounded to nearest even e4m3, saturated (NaN stays), the first in the lowest byte.
TANDEM_DEVICE u32 pack_e4m3(float a, float b, float c, float d) {
#if TANDEM_ON_DEVICE
  u32 y;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, "
      "%3; "
      "mov.b32 %0, {low, high}; }"
      : "=r"(y)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return y;
#else
  return emulator::pack_e4m3(a, b, c, d);
#endif
}

/// Two e4m3 values as f32, the first in bits 0 to 7.
TANDEM_DEVICE void unpack_e4m3(float& first, float& second, u32 quantized) {
#if TANDEM_ON_DEVICE
  asm("{ .reg .b16 low, high; .reg .b32 both; cvt.rn.f16x2.e4m3x2 both, %2; mov.b32 {low, high}, both; "
      "cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
      : "=f"(first), "=f"(second)
      : "h"(static_cast<u16>(quantized)));
#else
  first = emulator::unpack_e4m3(quantized & 0xFFU);
  second = emulator::unpack_e4m3(quantized >> 8 & 0xFFU);
#endif
}

/// Four e4m3 values as two words of packed f16, exactly, in their order.
TANDEM_DEVICE void e4m3_to_f16(u32& low, u32& high, u32 four) {
#if TANDEM_ON_DEVICE
  asm("{ .reg .b16 first, second; mov.b32 {first, second}, %2; cvt.rn.f16x2.e4m3x2 %0, first; "
      "cvt.rn.f16x2.e4m3x2 %1, second; }"
      : "=r"(low), "=r"(high)
      : "r"(four));
#else
  low = emulator::pack_f16(emulator::unpack_e4m3(four & 0xFFU), emulator::unpack_e4m3(four >> 8 & 0xFFU));
  high = emulator::pack_f16(emulator::unpack_e4m3(four >> 16 & 0xFFU), emulator::unpack_e4m3(four >> 24));
#endif
}

/// a - b of two packed f16 each, rounded to nearest even.
TANDEM_DEVICE u32 subtract_f16(u32 a, u32 b) {
#if TANDEM_ON_DEVICE
  u32 y;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  // An f32 has twice the digits of an f16 and two: the second rounding changes nothing.
  return emulator::pack_f16(emulator::unpack(static_cast<u16>(a), Element::f16) -
                                emulator::unpack(static_cast<u16>(b), Element::f16),
                            emulator::unpack(static_cast<u16>(a >> 16), Element::f16) -
                                emulator::unpack(static_cast<u16>(b >> 16), Element::f16));
#endif
}

/// Four f32 rounded to the nearest even whole numbers, from 0 to 255 (NaN is 0), the first in the lowest
/// byte.
TANDEM_DEVICE u32 pack_u8(float a, float b, float c, float d) {
#if TANDEM_ON_DEVICE
  u32 y;
  asm("{ .reg .s32 w, x, y, z; .reg .b32 high; cvt.rni.s32.f32 w, %1; cvt.rni.s32.f32 x, %2; "
      "cvt.rni.s32.f32 y, %3; cvt.rni.s32.f32 z, %4; cvt.pack.sat.u8.s32.b32 high, z, y, 0; "
      "cvt.pack.sat.u8.s32.b32 %0, x, w, high; }"
      : "=r"(y)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return y;
#else
  return emulator::pack_u8(a, b, c, d);
#endif
}

/// x * step rounded to the nearest even whole number, from 0 to 255, in the lowest byte: the sum with 1.5 *
/// 2^23 has it there.
TANDEM_DEVICE float round_to_byte(float x, float step) {
#if TANDEM_ON_DEVICE
  return ::fmaf(x, step, 12582912.0F);
#else
  return emulator::fma(x, step, 12582912.0F);
#endif
}
/// The lowest bytes of four words, the first in the lowest.
TANDEM_DEVICE u32 pack_low_bytes(float a, float b, float c, float d) {
#if TANDEM_ON_DEVICE
  const u32 low = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
  const u32 high = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040);
  return __byte_perm(low, high, 0x5410);
#else
  return emulator::low_bytes(a, b, c, d);
#endif
}

/// The larger one; a NaN loses against a number. (A NaN score still reaches its row through its exponential.)
TANDEM_DEVICE float fmax(float a, float b) {
#if TANDEM_ON_DEVICE
  return ::fmaxf(a, b);
#else
  return emulator::fmax(a, b);
#endif
}

/// The larger one, or NaN if one is.
TANDEM_DEVICE float fmax_nan(float a, float b) {
#if TANDEM_ON_DEVICE
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return emulator::fmax_nan(a, b);
#endif
}

TANDEM_DEVICE float abs(float x) {
  return ::fabsf(x);
}

/// a * b + c, rounded once.
TANDEM_DEVICE float fma(float a, float b, float c) {
#if TANDEM_ON_DEVICE
  return ::fmaf(a, b, c);
#else
  return emulator::fma(a, b, c);
#endif
}

TANDEM_DEVICE float infinity() {
  return __int_as_float(0x7f800000);
}

}  // namespace tandem::ptx
