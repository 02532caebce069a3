// Rounding f32 to 8-bit values. `multiply` rounds a product before anything is added to it, so that the
// compiler does not fuse the two: the quantized values are to equal the CPU's.
#pragma once

#include "ptx/base.cuh"

namespace tandem::ptx {

TANDEM_DEVICE float multiply(float a, float b) {
  return __fmul_rn(a, b);
}
/// The quotient to nearest even, as IEEE 754 has it.
TANDEM_DEVICE float divide(float a, float b) {
  return __fdiv_rn(a, b);
}
/// The bits of an f32, and back.
TANDEM_DEVICE u32 bits_of(float x) {
  return __float_as_uint(x);
}
TANDEM_DEVICE float float_of(u32 bits) {
  return __uint_as_float(bits);
}

TANDEM_DEVICE float quiet_nan() {
  return float_of(0x7fc00000U);
}

/// The larger of `largest` and |x|; NaN if either is.
TANDEM_DEVICE float max_magnitude(float largest, float x) {
#if TANDEM_ON_DEVICE
  float y;
  asm("{ .reg .f32 m; abs.f32 m, %2; max.NaN.f32 %0, %1, m; }" : "=f"(y) : "f"(largest), "f"(x));
  return y;
#else
  return emulator::max_magnitude(largest, x);
#endif
}

/// The integer nearest to x, ties to even, as two's complement in bits 0 to 7. The other bits are undefined;
/// |x| is at most 127.
TANDEM_DEVICE u32 round_s8(float x) {
  return bits_of(x + 0x1.8p23F);  // the last bit of such a float is worth 1
}

/// sum + 128 times the sum of the four u8 of `quantized`.
TANDEM_DEVICE u32 add_128_times(u32 sum, u32 quantized) {
  return __dp4a(quantized, 0x80808080U, sum);
}

/// Byte i of the result is byte number (selector's nibble i) of `low` (0 to 3) and `high` (4 to 7).
TANDEM_DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) {
  return __byte_perm(low, high, selector);
}

}  // namespace tandem::ptx
