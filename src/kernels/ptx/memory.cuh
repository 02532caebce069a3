// Global memory accesses and atomics. Every address goes through here, so that the emulator can check its
// bounds.
#pragma once

#include "kernels/ptx/base.cuh"

namespace tandem::ptx {

struct alignas(16) Vec4 {
  u32 x, y, z, w;
};
struct alignas(16) Float4 {
  float x, y, z, w;
};
struct alignas(8) Float2 {
  float x, y;
};

/// T is 1, 2, 4, 8 or 16 bytes and naturally aligned.
template <typename T>
TANDEM_DEVICE T load_global(const T* p) {
#if TANDEM_ON_DEVICE
  return __ldg(p);
#else
  return emulator::load_global(p);
#endif
}
TANDEM_DEVICE Vec4 load_global(const Vec4* p) {
#if TANDEM_ON_DEVICE
  Vec4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
#else
  return emulator::load_global(p);
#endif
}
/// Not through the read-only cache: what the grid before this one may still have written after this one
/// began.
TANDEM_DEVICE Float4 load_global(const Float4* p) {
#if TANDEM_ON_DEVICE
  Float4 v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
#else
  return emulator::load_global(p);
#endif
}
TANDEM_DEVICE float load_written(const float* p) {
#if TANDEM_ON_DEVICE
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
#else
  return emulator::load_global(p);
#endif
}
TANDEM_DEVICE u32 load_written(const u32* p) {
#if TANDEM_ON_DEVICE
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
#else
  return emulator::load_global(p);
#endif
}
TANDEM_DEVICE Float2 load_global(const Float2* p) {
#if TANDEM_ON_DEVICE
  Float2 v;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
#else
  return emulator::load_global(p);
#endif
}
template <typename T>
TANDEM_DEVICE void store_global(T* p, T value) {
#if TANDEM_ON_DEVICE
  *p = value;
#else
  emulator::store_global(p, value);
#endif
}

/// Adds and returns the value before; relaxed, device scope.
TANDEM_DEVICE u32 atomic_add(u32* p, u32 value) {
#if TANDEM_ON_DEVICE
  return atomicAdd(p, value);
#else
  return emulator::atomic_add(p, value);
#endif
}

/// Raises the number at p to `value` if it is lower; relaxed, device scope.
TANDEM_DEVICE void atomic_max(u32* p, u32 value) {
#if TANDEM_ON_DEVICE
  atomicMax(p, value);
#else
  emulator::atomic_max(p, value);
#endif
}

/// atomic_add, after what this block wrote before, and before what it reads then.
TANDEM_DEVICE u32 atomic_add_ordered(u32* p, u32 value) {
#if TANDEM_ON_DEVICE
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(p), "r"(value)
               : "memory");
  return before;
#else
  return emulator::atomic_add(p, value);
#endif
}

/// The number at p, which other blocks raise by raise_turn; what they wrote before is then visible.
TANDEM_DEVICE u32 read_turn(const u32* p) {
#if TANDEM_ON_DEVICE
  u32 now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(p) : "memory");
  return now;
#else
  return emulator::read_turn(p);
#endif
}
/// Waits until the number at p, which other blocks raise by raise_turn, is `value`; what they wrote before is
/// then visible.
TANDEM_DEVICE void wait_turn(const u32* p, u32 value) {
#if TANDEM_ON_DEVICE
  while (read_turn(p) != value) {
  }
#else
  emulator::wait_turn(p, value);
#endif
}
/// As wait_turn, where it may take long.
TANDEM_DEVICE void wait_long(const u32* p, u32 value) {
#if TANDEM_ON_DEVICE
  while (read_turn(p) != value) __nanosleep(500);
#else
  emulator::wait_long(p, value);
#endif
}
/// The number at p, as read_turn; a 0 becomes 1, for one block alone.
TANDEM_DEVICE u32 claim_turn(u32* p) {
#if TANDEM_ON_DEVICE
  u32 before;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(before) : "l"(p) : "memory");
  return before;
#else
  return emulator::claim_turn(p);
#endif
}
/// Adds 1, after what this thread wrote before.
TANDEM_DEVICE void raise_turn(u32* p) {
#if TANDEM_ON_DEVICE
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
#else
  emulator::raise_turn(p);
#endif
}

/// Ordinary shared-memory accesses.
template <typename T>
TANDEM_DEVICE T load_shared(const T* p) {
#if TANDEM_ON_DEVICE
  return *p;
#else
  return emulator::load_shared(p);
#endif
}
template <typename T>
TANDEM_DEVICE void store_shared(T* p, T value) {
#if TANDEM_ON_DEVICE
  *p = value;
#else
  emulator::store_shared(p, value);
#endif
}

/// Copies 16 bytes without passing through registers; they are there for this thread after wait_for_copies.
TANDEM_DEVICE void copy_async(Vec4* shared, const Vec4* global) {
#if TANDEM_ON_DEVICE
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
#else
  emulator::store_shared(shared, emulator::load_global(global));
#endif
}
TANDEM_DEVICE void copy_async(float* shared, const float* global) {
#if TANDEM_ON_DEVICE
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
#else
  emulator::store_shared(shared, emulator::load_global(global));
#endif
}
TANDEM_DEVICE void wait_for_copies() {
#if TANDEM_ON_DEVICE
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

/// Loads four 8x8 matrices of 16-bit elements transposed; lane l passes the address of row l % 8 of matrix l
/// / 8, and has rows 2 (l % 4), + 1 of column l / 4 of each.
TANDEM_DEVICE void ldmatrix_x4_transposed(const void* row, u32 (&d)[4]) {
#if TANDEM_ON_DEVICE
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(row))
               : "memory");
#else
  emulator::ldmatrix_x4_transposed(row, d);
#endif
}
/// Stores four 8x8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8.
TANDEM_DEVICE void stmatrix_x4(void* row, u32 a, u32 b, u32 c, u32 d) {
#if TANDEM_ON_DEVICE
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
#else
  emulator::stmatrix_x4(row, a, b, c, d);
#endif
}

}  // namespace tandem::ptx
