// Warpgroup matrix multiply-accumulate: D (64 x N, registers) += A (64 x K, registers or shared) * B (K x N,
// shared).
//
// Register layout of D: thread t of the warpgroup, warp w = t / 32, lane l = t % 32, holds in d[4 * j + 2 * h
// + e] the element of row 16 * w + l / 4 + 8 * h and column 8 * j + 2 * (l % 4) + e. A in registers (16-bit,
// K = 16): a[2 * g + h] packs columns 8 * g + 2 * (l % 4) + {0, 1} of row 16 * w + l / 4 + 8 * h, which is
// D's layout of two neighbouring j.
#pragma once

#include "config/types.hpp"
#include "ptx/trace.cuh"

namespace tandem::ptx {

/// Where a WGMMA operand lies in shared memory. `leading` and `stride` are the byte steps of the hardware's
/// descriptor: K-major: stride = from one group of 8 rows to the next, leading unused (1). MN-major: leading
/// = from one swizzle-wide strip along M or N to the next, stride = from one group of 8 along K to the next.
struct MatrixDescriptor {
  u32 low;   ///< start address / 16 and leading / 16
  u32 high;  ///< stride / 16 and the swizzle mode

  /// The operand `bytes` further on; bytes is a multiple of 16. Addresses have 18 bits, so nothing carries
  /// into `high`.
  TANDEM_DEVICE MatrixDescriptor operator+(u32 bytes) const { return {low + (bytes >> 4), high}; }
  TANDEM_DEVICE u64 bits() const { return static_cast<u64>(high) << 32 | low; }
};

TANDEM_DEVICE MatrixDescriptor matrix_descriptor(const void* shared, u32 leading, u32 stride,
                                                 Swizzle swizzle) {
  const u32 mode = swizzle == Swizzle::b128 ? 1 : swizzle == Swizzle::b64 ? 2 : 3;
  return {(shared_address(shared) & 0x3ffff) >> 4 | leading >> 4 << 16, stride >> 4 | mode << 30};
}

/// Hides from the compiler where the address comes from. It then computes sums with the address at each use
/// instead of keeping them in registers, of which there are too few.
TANDEM_DEVICE void forget_address(MatrixDescriptor& d) {
#if TANDEM_ON_DEVICE
  asm volatile("" : "+r"(d.low));
#else
  (void)d;
#endif
}

/// Orders register accesses before the WGMMAs that follow. First thing before a batch.
TANDEM_DEVICE void wgmma_fence() {
#if TANDEM_ON_DEVICE
  trace(TraceEvent::issue);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
  emulator::wgmma_fence();
#endif
}
/// Closes a batch of WGMMAs; wgmma_wait<n> waits until at most n batches are unfinished.
TANDEM_DEVICE void wgmma_commit() {
#if TANDEM_ON_DEVICE
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  trace(TraceEvent::issue_end);
#else
  emulator::wgmma_commit();
#endif
}
template <int pending>
TANDEM_DEVICE void wgmma_wait() {
#if TANDEM_ON_DEVICE
  trace(TraceEvent::wait_products, pending);
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
  trace(TraceEvent::wait_products_end, pending);
#else
  emulator::wgmma_wait(pending);
#endif
}

/// The compiler may not move accesses of these registers across this point (they belong to the tensor cores
/// between a WGMMA's issue and its wait).
template <int n>
TANDEM_DEVICE void pin_registers(float (&d)[n]) {
#if TANDEM_ON_DEVICE
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
#else
  emulator::check_registers(d, n);
#endif
}

#if TANDEM_ON_DEVICE
// The instruction names each accumulator register, so its text depends on N. These lists are the only macros
// of the device language: TANDEM_REGISTERS_<n> is "%0, ..., %<n-1>" and TANDEM_OPERANDS_<n>(c) the matching
// c(d[0]), ..., c being "+f" or "+r".
// clang-format off
#define TANDEM_REGISTERS_4 "%0, %1, %2, %3"
#define TANDEM_REGISTERS_8 TANDEM_REGISTERS_4 ", %4, %5, %6, %7"
#define TANDEM_REGISTERS_12 TANDEM_REGISTERS_8 ", %8, %9, %10, %11"
#define TANDEM_REGISTERS_16 TANDEM_REGISTERS_12 ", %12, %13, %14, %15"
#define TANDEM_REGISTERS_20 TANDEM_REGISTERS_16 ", %16, %17, %18, %19"
#define TANDEM_REGISTERS_24 TANDEM_REGISTERS_20 ", %20, %21, %22, %23"
#define TANDEM_REGISTERS_28 TANDEM_REGISTERS_24 ", %24, %25, %26, %27"
#define TANDEM_REGISTERS_32 TANDEM_REGISTERS_28 ", %28, %29, %30, %31"
#define TANDEM_REGISTERS_36 TANDEM_REGISTERS_32 ", %32, %33, %34, %35"
#define TANDEM_REGISTERS_40 TANDEM_REGISTERS_36 ", %36, %37, %38, %39"
#define TANDEM_REGISTERS_44 TANDEM_REGISTERS_40 ", %40, %41, %42, %43"
#define TANDEM_REGISTERS_48 TANDEM_REGISTERS_44 ", %44, %45, %46, %47"
#define TANDEM_REGISTERS_52 TANDEM_REGISTERS_48 ", %48, %49, %50, %51"
#define TANDEM_REGISTERS_56 TANDEM_REGISTERS_52 ", %52, %53, %54, %55"
#define TANDEM_REGISTERS_60 TANDEM_REGISTERS_56 ", %56, %57, %58, %59"
#define TANDEM_REGISTERS_64 TANDEM_REGISTERS_60 ", %60, %61, %62, %63"
#define TANDEM_REGISTERS_68 TANDEM_REGISTERS_64 ", %64, %65, %66, %67"
#define TANDEM_REGISTERS_72 TANDEM_REGISTERS_68 ", %68, %69, %70, %71"
#define TANDEM_REGISTERS_76 TANDEM_REGISTERS_72 ", %72, %73, %74, %75"
#define TANDEM_REGISTERS_80 TANDEM_REGISTERS_76 ", %76, %77, %78, %79"
#define TANDEM_REGISTERS_84 TANDEM_REGISTERS_80 ", %80, %81, %82, %83"
#define TANDEM_REGISTERS_88 TANDEM_REGISTERS_84 ", %84, %85, %86, %87"
#define TANDEM_REGISTERS_92 TANDEM_REGISTERS_88 ", %88, %89, %90, %91"
#define TANDEM_REGISTERS_96 TANDEM_REGISTERS_92 ", %92, %93, %94, %95"
#define TANDEM_REGISTERS_100 TANDEM_REGISTERS_96 ", %96, %97, %98, %99"
#define TANDEM_REGISTERS_104 TANDEM_REGISTERS_100 ", %100, %101, %102, %103"
#define TANDEM_REGISTERS_108 TANDEM_REGISTERS_104 ", %104, %105, %106, %107"
#define TANDEM_REGISTERS_112 TANDEM_REGISTERS_108 ", %108, %109, %110, %111"
#define TANDEM_REGISTERS_116 TANDEM_REGISTERS_112 ", %112, %113, %114, %115"
#define TANDEM_REGISTERS_120 TANDEM_REGISTERS_116 ", %116, %117, %118, %119"
#define TANDEM_REGISTERS_124 TANDEM_REGISTERS_120 ", %120, %121, %122, %123"
#define TANDEM_REGISTERS_128 TANDEM_REGISTERS_124 ", %124, %125, %126, %127"
#define TANDEM_OPERANDS_4(c) c(d[0]), c(d[1]), c(d[2]), c(d[3])
#define TANDEM_OPERANDS_8(c) TANDEM_OPERANDS_4(c), c(d[4]), c(d[5]), c(d[6]), c(d[7])
#define TANDEM_OPERANDS_12(c) TANDEM_OPERANDS_8(c), c(d[8]), c(d[9]), c(d[10]), c(d[11])
#define TANDEM_OPERANDS_16(c) TANDEM_OPERANDS_12(c), c(d[12]), c(d[13]), c(d[14]), c(d[15])
#define TANDEM_OPERANDS_20(c) TANDEM_OPERANDS_16(c), c(d[16]), c(d[17]), c(d[18]), c(d[19])
#define TANDEM_OPERANDS_24(c) TANDEM_OPERANDS_20(c), c(d[20]), c(d[21]), c(d[22]), c(d[23])
#define TANDEM_OPERANDS_28(c) TANDEM_OPERANDS_24(c), c(d[24]), c(d[25]), c(d[26]), c(d[27])
#define TANDEM_OPERANDS_32(c) TANDEM_OPERANDS_28(c), c(d[28]), c(d[29]), c(d[30]), c(d[31])
#define TANDEM_OPERANDS_36(c) TANDEM_OPERANDS_32(c), c(d[32]), c(d[33]), c(d[34]), c(d[35])
#define TANDEM_OPERANDS_40(c) TANDEM_OPERANDS_36(c), c(d[36]), c(d[37]), c(d[38]), c(d[39])
#define TANDEM_OPERANDS_44(c) TANDEM_OPERANDS_40(c), c(d[40]), c(d[41]), c(d[42]), c(d[43])
#define TANDEM_OPERANDS_48(c) TANDEM_OPERANDS_44(c), c(d[44]), c(d[45]), c(d[46]), c(d[47])
#define TANDEM_OPERANDS_52(c) TANDEM_OPERANDS_48(c), c(d[48]), c(d[49]), c(d[50]), c(d[51])
#define TANDEM_OPERANDS_56(c) TANDEM_OPERANDS_52(c), c(d[52]), c(d[53]), c(d[54]), c(d[55])
#define TANDEM_OPERANDS_60(c) TANDEM_OPERANDS_56(c), c(d[56]), c(d[57]), c(d[58]), c(d[59])
#define TANDEM_OPERANDS_64(c) TANDEM_OPERANDS_60(c), c(d[60]), c(d[61]), c(d[62]), c(d[63])
#define TANDEM_OPERANDS_68(c) TANDEM_OPERANDS_64(c), c(d[64]), c(d[65]), c(d[66]), c(d[67])
#define TANDEM_OPERANDS_72(c) TANDEM_OPERANDS_68(c), c(d[68]), c(d[69]), c(d[70]), c(d[71])
#define TANDEM_OPERANDS_76(c) TANDEM_OPERANDS_72(c), c(d[72]), c(d[73]), c(d[74]), c(d[75])
#define TANDEM_OPERANDS_80(c) TANDEM_OPERANDS_76(c), c(d[76]), c(d[77]), c(d[78]), c(d[79])
#define TANDEM_OPERANDS_84(c) TANDEM_OPERANDS_80(c), c(d[80]), c(d[81]), c(d[82]), c(d[83])
#define TANDEM_OPERANDS_88(c) TANDEM_OPERANDS_84(c), c(d[84]), c(d[85]), c(d[86]), c(d[87])
#define TANDEM_OPERANDS_92(c) TANDEM_OPERANDS_88(c), c(d[88]), c(d[89]), c(d[90]), c(d[91])
#define TANDEM_OPERANDS_96(c) TANDEM_OPERANDS_92(c), c(d[92]), c(d[93]), c(d[94]), c(d[95])
#define TANDEM_OPERANDS_100(c) TANDEM_OPERANDS_96(c), c(d[96]), c(d[97]), c(d[98]), c(d[99])
#define TANDEM_OPERANDS_104(c) TANDEM_OPERANDS_100(c), c(d[100]), c(d[101]), c(d[102]), c(d[103])
#define TANDEM_OPERANDS_108(c) TANDEM_OPERANDS_104(c), c(d[104]), c(d[105]), c(d[106]), c(d[107])
#define TANDEM_OPERANDS_112(c) TANDEM_OPERANDS_108(c), c(d[108]), c(d[109]), c(d[110]), c(d[111])
#define TANDEM_OPERANDS_116(c) TANDEM_OPERANDS_112(c), c(d[112]), c(d[113]), c(d[114]), c(d[115])
#define TANDEM_OPERANDS_120(c) TANDEM_OPERANDS_116(c), c(d[116]), c(d[117]), c(d[118]), c(d[119])
#define TANDEM_OPERANDS_124(c) TANDEM_OPERANDS_120(c), c(d[120]), c(d[121]), c(d[122]), c(d[123])
#define TANDEM_OPERANDS_128(c) TANDEM_OPERANDS_124(c), c(d[124]), c(d[125]), c(d[126]), c(d[127])


// X(n, r, r + 1, ..., r + 6): every N, its accumulator registers r = N / 2, and the numbers of the operands after them.
#define TANDEM_WGMMA_SIZES(X) \
  X(8, 4, 5, 6, 7, 8, 9, 10) \
  X(16, 8, 9, 10, 11, 12, 13, 14) \
  X(24, 12, 13, 14, 15, 16, 17, 18) \
  X(32, 16, 17, 18, 19, 20, 21, 22) \
  X(40, 20, 21, 22, 23, 24, 25, 26) \
  X(48, 24, 25, 26, 27, 28, 29, 30) \
  X(56, 28, 29, 30, 31, 32, 33, 34) \
  X(64, 32, 33, 34, 35, 36, 37, 38) \
  X(72, 36, 37, 38, 39, 40, 41, 42) \
  X(80, 40, 41, 42, 43, 44, 45, 46) \
  X(88, 44, 45, 46, 47, 48, 49, 50) \
  X(96, 48, 49, 50, 51, 52, 53, 54) \
  X(104, 52, 53, 54, 55, 56, 57, 58) \
  X(112, 56, 57, 58, 59, 60, 61, 62) \
  X(120, 60, 61, 62, 63, 64, 65, 66) \
  X(128, 64, 65, 66, 67, 68, 69, 70) \
  X(136, 68, 69, 70, 71, 72, 73, 74) \
  X(144, 72, 73, 74, 75, 76, 77, 78) \
  X(152, 76, 77, 78, 79, 80, 81, 82) \
  X(160, 80, 81, 82, 83, 84, 85, 86) \
  X(168, 84, 85, 86, 87, 88, 89, 90) \
  X(176, 88, 89, 90, 91, 92, 93, 94) \
  X(184, 92, 93, 94, 95, 96, 97, 98) \
  X(192, 96, 97, 98, 99, 100, 101, 102) \
  X(200, 100, 101, 102, 103, 104, 105, 106) \
  X(208, 104, 105, 106, 107, 108, 109, 110) \
  X(216, 108, 109, 110, 111, 112, 113, 114) \
  X(224, 112, 113, 114, 115, 116, 117, 118) \
  X(232, 116, 117, 118, 119, 120, 121, 122) \
  X(240, 120, 121, 122, 123, 124, 125, 126) \
  X(248, 124, 125, 126, 127, 128, 129, 130) \
  X(256, 128, 129, 130, 131, 132, 133, 134)

#define TANDEM_WGMMA_SHARED(type, n, r, o1, o2, o3, o4)                                                          \
  if constexpr (N == n)                                                                                          \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #o2 ", 0; "                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type                               \
                 " {" TANDEM_REGISTERS_##r "}, %" #r ", %" #o1 ", p, 1, 1, %" #o3 ", %" #o4 "; }"                \
                 : TANDEM_OPERANDS_##r("+f")                                                                     \
                 : "l"(a.bits()), "l"(b.bits()), "r"(static_cast<i32>(accumulate)), "n"(a_mn_major),             \
                   "n"(b_mn_major));
#define TANDEM_WGMMA_SHARED_BF16(n, r, o1, o2, o3, o4, o5, o6) TANDEM_WGMMA_SHARED(bf16, n, r, o1, o2, o3, o4)
#define TANDEM_WGMMA_SHARED_F16(n, r, o1, o2, o3, o4, o5, o6) TANDEM_WGMMA_SHARED(f16, n, r, o1, o2, o3, o4)

#define TANDEM_WGMMA_REGISTERS(type, n, r, o1, o2, o3, o4, o5, o6)                                               \
  if constexpr (N == n)                                                                                          \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #o5 ", 0; "                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type                               \
                 " {" TANDEM_REGISTERS_##r "}, {%" #r ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1, %"    \
                 #o6 "; }"                                                                                       \
                 : TANDEM_OPERANDS_##r("+f")                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "r"(static_cast<i32>(accumulate)),   \
                   "n"(b_mn_major));
#define TANDEM_WGMMA_REGISTERS_BF16(...) TANDEM_WGMMA_REGISTERS(bf16, __VA_ARGS__)
#define TANDEM_WGMMA_REGISTERS_F16(...) TANDEM_WGMMA_REGISTERS(f16, __VA_ARGS__)
// clang-format on
#endif

/// D = A B + (accumulate ? D : 0), K = 16, A and B in shared memory. b_mn_major: B is stored with N
/// contiguous; a_mn_major: A with M.
template <int N, Element element, bool b_mn_major, bool a_mn_major = false>
TANDEM_DEVICE void wgmma_shared(float (&d)[N / 2], MatrixDescriptor a, MatrixDescriptor b, bool accumulate) {
#if TANDEM_ON_DEVICE
  if constexpr (element == Element::bf16) {
    TANDEM_WGMMA_SIZES(TANDEM_WGMMA_SHARED_BF16)
  } else {
    TANDEM_WGMMA_SIZES(TANDEM_WGMMA_SHARED_F16)
  }
#else
  emulator::wgmma_shared(d, N, element, a.bits(), b.bits(), a_mn_major, b_mn_major, accumulate);
#endif
}

/// As wgmma_shared, with A's 64 x 16 tile in registers.
template <int N, Element element, bool b_mn_major>
TANDEM_DEVICE void wgmma_registers(float (&d)[N / 2], const u32* a, MatrixDescriptor b, bool accumulate) {
#if TANDEM_ON_DEVICE
  if constexpr (element == Element::bf16) {
    TANDEM_WGMMA_SIZES(TANDEM_WGMMA_REGISTERS_BF16)
  } else {
    TANDEM_WGMMA_SIZES(TANDEM_WGMMA_REGISTERS_F16)
  }
#else
  emulator::wgmma_registers(d, N, element, a, b.bits(), b_mn_major, accumulate);
#endif
}

}  // namespace tandem::ptx
