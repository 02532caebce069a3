// Warpgroup matrix products of 8-bit operands, K = 32: e4m3 with f32 sums, s8 and u8 with exact s32 sums.
// Both operands are K-major. D lies in registers as wgmma.cuh says. A in registers: a[2 * g + h] packs
// columns 16 * g + 4 * (l % 4) + {0, 1, 2, 3} of row 16 * w + l / 4 + 8 * h, the first in the lowest byte.
#pragma once

#include "ptx/wgmma.cuh"

namespace tandem::ptx {

/// The type of D's elements.
template <Bytes bytes>
struct ByteSum {
  using type = i32;
};
template <>
struct ByteSum<Bytes::e4m3> {
  using type = float;
};

/// As for floats: the compiler may not move accesses of these registers across this point.
template <int n>
TANDEM_DEVICE void pin_registers(i32 (&d)[n]) {
#if TANDEM_ON_DEVICE
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(d[i])::"memory");
#else
  emulator::check_registers(d, n);
#endif
}

#if TANDEM_ON_DEVICE
// clang-format off
#define TANDEM_WGMMA_BYTES_SHARED(types, c, adds, immediates, n, r, o1)                                           \
  if constexpr (N == n)                                                                                          \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " adds ", 0; "                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32." types                                             \
                 " {" TANDEM_REGISTERS_##r "}, %" #r ", %" #o1 ", p" immediates "; }"                            \
                 : TANDEM_OPERANDS_##r(c)                                                                        \
                 : "l"(a.bits()), "l"(b.bits()));
#define TANDEM_WGMMA_E4M3_SHARED(n, r, o1, o2, o3, o4, o5, o6) \
  TANDEM_WGMMA_BYTES_SHARED("f32.e4m3.e4m3", "+f", "1", ", 1, 1", n, r, o1)
#define TANDEM_WGMMA_E4M3_SHARED_FRESH(n, r, o1, o2, o3, o4, o5, o6) \
  TANDEM_WGMMA_BYTES_SHARED("f32.e4m3.e4m3", "=f", "0", ", 1, 1", n, r, o1)
#define TANDEM_WGMMA_S8_SHARED(n, r, o1, o2, o3, o4, o5, o6) \
  TANDEM_WGMMA_BYTES_SHARED("s32.s8.s8", "+r", "1", "", n, r, o1)
#define TANDEM_WGMMA_S8_SHARED_FRESH(n, r, o1, o2, o3, o4, o5, o6) \
  TANDEM_WGMMA_BYTES_SHARED("s32.s8.s8", "=r", "0", "", n, r, o1)

#define TANDEM_WGMMA_BYTES_REGISTERS(types, c, adds, immediates, n, r, o1, o2, o3, o4)                            \
  if constexpr (N == n)                                                                                          \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " adds ", 0; "                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32." types                                             \
                 " {" TANDEM_REGISTERS_##r "}, {%" #r ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p"             \
                 immediates "; }"                                                                                \
                 : TANDEM_OPERANDS_##r(c)                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()));
#define TANDEM_WGMMA_E4M3_REGISTERS(n, r, o1, o2, o3, o4, o5, o6) \
  TANDEM_WGMMA_BYTES_REGISTERS("f32.e4m3.e4m3", "+f", "1", ", 1, 1", n, r, o1, o2, o3, o4)
#define TANDEM_WGMMA_E4M3_REGISTERS_FRESH(n, r, o1, o2, o3, o4, o5, o6) \
  TANDEM_WGMMA_BYTES_REGISTERS("f32.e4m3.e4m3", "=f", "0", ", 1, 1", n, r, o1, o2, o3, o4)
#define TANDEM_WGMMA_E4M3_REGISTERS_REPLACE(n, r, o1, o2, o3, o4, o5, o6) \
  TANDEM_WGMMA_BYTES_REGISTERS("f32.e4m3.e4m3", "+f", "0", ", 1, 1", n, r, o1, o2, o3, o4)
#define TANDEM_WGMMA_U8_REGISTERS(n, r, o1, o2, o3, o4, o5, o6) \
  TANDEM_WGMMA_BYTES_REGISTERS("s32.u8.s8", "+r", "1", "", n, r, o1, o2, o3, o4)
#define TANDEM_WGMMA_U8_REGISTERS_FRESH(n, r, o1, o2, o3, o4, o5, o6) \
  TANDEM_WGMMA_BYTES_REGISTERS("s32.u8.s8", "=r", "0", "", n, r, o1, o2, o3, o4)
#define TANDEM_WGMMA_U8_REGISTERS_REPLACE(n, r, o1, o2, o3, o4, o5, o6) \
  TANDEM_WGMMA_BYTES_REGISTERS("s32.u8.s8", "+r", "0", "", n, r, o1, o2, o3, o4)
#define TANDEM_WGMMA_U8_U8_REGISTERS(n, r, o1, o2, o3, o4, o5, o6) \
  TANDEM_WGMMA_BYTES_REGISTERS("s32.u8.u8", "+r", "1", "", n, r, o1, o2, o3, o4)
#define TANDEM_WGMMA_U8_U8_REGISTERS_FRESH(n, r, o1, o2, o3, o4, o5, o6) \
  TANDEM_WGMMA_BYTES_REGISTERS("s32.u8.u8", "=r", "0", "", n, r, o1, o2, o3, o4)
#define TANDEM_WGMMA_U8_U8_REGISTERS_REPLACE(n, r, o1, o2, o3, o4, o5, o6) \
  TANDEM_WGMMA_BYTES_REGISTERS("s32.u8.u8", "+r", "0", "", n, r, o1, o2, o3, o4)

#define TANDEM_WGMMA_BY_START(product)             \
  if constexpr (start == Start::add) {             \
    TANDEM_WGMMA_SIZES(product)                    \
  } else if constexpr (start == Start::replace) {  \
    TANDEM_WGMMA_SIZES(product##_REPLACE)          \
  } else {                                         \
    TANDEM_WGMMA_SIZES(product##_FRESH)            \
  }
// clang-format on
#endif

/// What a product does with D. To the tensor cores `replace` and `fresh` are the same: D's old value does not
/// count. To the compiler they differ. With `fresh` it may choose any registers, since D has no value before;
/// with `replace` it keeps D's registers, and what still reads them comes first. With the wrong choice ptxas
/// takes the accumulators of head dimension 256 to be live through the whole loop, and spills them.
enum class Start : int { add, replace, fresh };

/// D = A B + (start is add ? D : 0), A and B in shared memory; e4m3 or s8.
template <int N, Bytes bytes, Start start>
TANDEM_DEVICE void wgmma_bytes_shared(typename ByteSum<bytes>::type (&d)[N / 2], MatrixDescriptor a,
                                      MatrixDescriptor b) {
  static_assert((bytes == Bytes::e4m3 || bytes == Bytes::s8) && start != Start::replace);
#if TANDEM_ON_DEVICE
  if constexpr (bytes == Bytes::e4m3) {
    if constexpr (start == Start::add) {
      TANDEM_WGMMA_SIZES(TANDEM_WGMMA_E4M3_SHARED)
    } else {
      TANDEM_WGMMA_SIZES(TANDEM_WGMMA_E4M3_SHARED_FRESH)
    }
  } else {
    if constexpr (start == Start::add) {
      TANDEM_WGMMA_SIZES(TANDEM_WGMMA_S8_SHARED)
    } else {
      TANDEM_WGMMA_SIZES(TANDEM_WGMMA_S8_SHARED_FRESH)
    }
  }
#else
  emulator::wgmma_bytes_shared(d, N, bytes, a.bits(), b.bits(), start == Start::add);
#endif
}

/// As wgmma_bytes_shared, with A's 64 x 32 tile in registers; not s8.
template <int N, Bytes bytes, Start start>
TANDEM_DEVICE void wgmma_bytes_registers(typename ByteSum<bytes>::type (&d)[N / 2], const u32* a,
                                         MatrixDescriptor b) {
  static_assert(bytes != Bytes::s8);
#if TANDEM_ON_DEVICE
  if constexpr (bytes == Bytes::e4m3) {
    TANDEM_WGMMA_BY_START(TANDEM_WGMMA_E4M3_REGISTERS)
  } else if constexpr (bytes == Bytes::u8_u8) {
    TANDEM_WGMMA_BY_START(TANDEM_WGMMA_U8_U8_REGISTERS)
  } else {
    TANDEM_WGMMA_BY_START(TANDEM_WGMMA_U8_REGISTERS)
  }
#else
  emulator::wgmma_bytes_registers(d, N, bytes, a, b.bits(), start == Start::add);
#endif
}

}  // namespace tandem::ptx
