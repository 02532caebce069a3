// Accumulators of a warpgroup in registers: who holds which element, and conversion to 16-bit operands.
#pragma once

#include "ptx/math.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"

namespace tandem::tile {

/// Position of a thread's accumulator elements in its warpgroup's 64 x N tile (see ptx/wgmma.cuh): element
/// d[4 * j + 2 * h + e] is at row(h), col(j) + e.
struct FragmentPosition {
  int first_row;
  int first_col;

  TANDEM_DEVICE explicit FragmentPosition(int thread_in_warpgroup)
      : first_row(thread_in_warpgroup / 32 * 16 + thread_in_warpgroup % 32 / 4),
        first_col(thread_in_warpgroup % 4 * 2) {}
  TANDEM_DEVICE int row(int h) const { return first_row + 8 * h; }
  TANDEM_DEVICE int col(int j) const { return first_col + 8 * j; }
};

/// The maximum over `lanes` neighbours; a NaN loses against a number.
template <int lanes = warp_size>
TANDEM_DEVICE float largest_of_lanes(float x) {
#pragma unroll
  for (int distance = 1; distance < lanes; distance *= 2) x = ptx::fmax(x, ptx::shuffle_xor(x, distance));
  return x;
}
template <int lanes = warp_size>
TANDEM_DEVICE float sum_of_lanes(float x) {
#pragma unroll
  for (int distance = 1; distance < lanes; distance *= 2) x += ptx::shuffle_xor(x, distance);
  return x;
}
/// The maximum over the four lanes that hold a row.
TANDEM_DEVICE float largest_of_quad(float x) {
  return largest_of_lanes<4>(x);
}
/// The maximum over the four lanes, or NaN if one of the values is.
TANDEM_DEVICE float largest_of_quad_nan(float x) {
  x = ptx::fmax_nan(x, ptx::shuffle_xor(x, 1));
  return ptx::fmax_nan(x, ptx::shuffle_xor(x, 2));
}

TANDEM_DEVICE float sum_of_quad(float x) {
  return sum_of_lanes<4>(x);
}

template <Element element>
TANDEM_DEVICE u32 pack(float low, float high) {
  return element == Element::bf16 ? ptx::pack_bf16(low, high) : ptx::pack_f16(low, high);
}

/// The two elements of a packed pair, as f32.
template <Element element>
TANDEM_DEVICE float unpack_low(u32 packed) {
  return ptx::unpack<element>(static_cast<u16>(packed));
}
template <Element element>
TANDEM_DEVICE float unpack_high(u32 packed) {
  return ptx::unpack<element>(static_cast<u16>(packed >> 16));
}

template <typename T, int n>
TANDEM_DEVICE void copy(T (&to)[n], const T (&from)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) to[i] = from[i];
}

template <int n>
TANDEM_DEVICE void set_zero(float (&d)[n]) {
#pragma unroll
  for (float& x : d) x = 0.0F;
}

/// Multiplies accumulators [first, end) by their rows' factors.
template <int n>
TANDEM_DEVICE void scale_rows(float (&d)[n], const float (&factor)[2], int first = 0, int end = n) {
#pragma unroll
  for (int i = first; i < end; ++i) d[i] *= factor[i / 2 % 2];
}
/// Multiplies them where a row's maximum has moved, which it does in few blocks. A NaN, too, is not 1. All
/// lanes of a warp call.
template <int n>
TANDEM_DEVICE void scale_moved_rows(float (&d)[n], const float (&factor)[2]) {
  if (ptx::any_lane(!(factor[0] == 1.0F && factor[1] == 1.0F))) scale_rows(d, factor);
}

/// f32 accumulators to 16-bit: also exactly the register layout of WGMMA's A operand, four words a step of 16
/// columns.
template <Element element, int n>
TANDEM_DEVICE void convert(u32 (&packed)[n / 2], const float (&d)[n], int first = 0, int last = n) {
#pragma unroll
  for (int i = first; i < last; i += 2) packed[i / 2] = pack<element>(d[i], d[i + 1]);
}

/// Transposes the 4 x 4 words of a quad: word j of lane i becomes word i of lane j.
TANDEM_DEVICE void transpose_quad(u32 (&words)[4], int quad_lane) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = (quad_lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32& low = words[distance == 1 ? 2 * i : i];
      u32& high = words[distance == 1 ? 2 * i + 1 : i + 2];
      const u32 received = ptx::shuffle_xor(upper ? low : high, distance);
      (upper ? low : high) = received;
    }
  }
}

}  // namespace tandem::tile
