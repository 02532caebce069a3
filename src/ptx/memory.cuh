// Global memory accesses and atomics. Every address goes through here, so that the emulator can check its
// bounds.
#pragma once

#include "ptx/base.cuh"

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

/// T is 1, 2, 4, 8 or 16 bytes and naturally aligned. Through the read-only cache, which need not see what
/// this grid writes, nor what a grid that has not ended does: load_written is for that.
template <typename T>
TANDEM_DEVICE T load_global(const T* p) {
  return __ldg(p);
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
/// These loads do not go through the read-only cache: the previous grid may still write what they read, after
/// this grid began.
TANDEM_DEVICE Float4 load_global(const Float4* p) {
#if TANDEM_ON_DEVICE
  Float4 v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
#else
  return emulator::load_written(p);
#endif
}
TANDEM_DEVICE float load_written(const float* p) {
#if TANDEM_ON_DEVICE
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
#else
  return emulator::load_written(p);
#endif
}
TANDEM_DEVICE u16 load_written(const u16* p) {
#if TANDEM_ON_DEVICE
  u16 v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
#else
  return emulator::load_written(p);
#endif
}
TANDEM_DEVICE u32 load_written(const u32* p) {
#if TANDEM_ON_DEVICE
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
#else
  return emulator::load_written(p);
#endif
}
TANDEM_DEVICE Float2 load_global(const Float2* p) {
#if TANDEM_ON_DEVICE
  Float2 v;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
#else
  return emulator::load_written(p);
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
  return atomicAdd(p, value);
}

/// Adds to the number at p, in any order with others; relaxed, device scope.
TANDEM_DEVICE void atomic_add(float* p, float value) {
#if TANDEM_ON_DEVICE
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(value) : "memory");
#else
  emulator::atomic_add(p, value);
#endif
}

/// Raises the number at p to `value` if it is lower; relaxed, device scope.
TANDEM_DEVICE void atomic_max(u32* p, u32 value) {
  atomicMax(p, value);
}

/// atomic_add with acquire and release order at device scope.
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

/// Reads a semaphore: a word of global memory that CTAs increment (semaphore_increment). What a CTA wrote
/// before it did is then visible.
TANDEM_DEVICE u32 semaphore_read(const u32* p) {
#if TANDEM_ON_DEVICE
  u32 now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(p) : "memory");
  return now;
#else
  return emulator::semaphore_read(p);
#endif
}
/// Waits until the semaphore is at least `value`, and then sees what other CTAs wrote before they incremented
/// it. (Not for `value` itself: of lengths that make no sense, others may have incremented it further.)
TANDEM_DEVICE void semaphore_wait(const u32* p, u32 value) {
#if TANDEM_ON_DEVICE
  while (semaphore_read(p) < value) {
  }
#else
  emulator::semaphore_wait(p, value);
#endif
}
/// As semaphore_wait, for waits that may be long: it sleeps between reads.
TANDEM_DEVICE void semaphore_wait_long(const u32* p, u32 value) {
#if TANDEM_ON_DEVICE
  while (semaphore_read(p) < value) __nanosleep(500);
#else
  emulator::semaphore_wait_long(p, value);
#endif
}
/// As semaphore_read, but if the semaphore is 0 it becomes 1: exactly one block gets the 0.
TANDEM_DEVICE u32 semaphore_claim(u32* p) {
#if TANDEM_ON_DEVICE
  u32 before;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(before) : "l"(p) : "memory");
  return before;
#else
  return emulator::semaphore_claim(p);
#endif
}
/// Adds 1 to the semaphore. What this thread wrote before is visible to those who see the sum.
TANDEM_DEVICE void semaphore_increment(u32* p) {
#if TANDEM_ON_DEVICE
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
#else
  emulator::semaphore_increment(p);
#endif
}

/// A flag of global memory, raised where it is this number. Nobody has to lower it first: memory that says
/// anything says this once in 2^64 times.
constexpr u64 raised_flag = 0x9E3779B97F4A7C15;

/// Raises a flag. What this thread wrote before is visible to those who see it.
TANDEM_DEVICE void flag_raise(u64* p) {
#if TANDEM_ON_DEVICE
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(raised_flag) : "memory");
#else
  emulator::flag_raise(p, raised_flag);
#endif
}
/// Waits for a raised flag, and lowers it. What was written before it was raised is then visible.
TANDEM_DEVICE void flag_take(u64* p) {
#if TANDEM_ON_DEVICE
  u64 now;
  do {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(p) : "memory");
  } while (now != raised_flag);
  *p = 0;
#else
  emulator::flag_take(p, raised_flag);
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

/// Starts copying 16 (or 4) bytes without passing through registers. This thread sees them after
/// wait_for_copies, or wait_for_copy_groups; others after a barrier behind that.
TANDEM_DEVICE void copy_async(Vec4* shared, const Vec4* global) {
#if TANDEM_ON_DEVICE
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
#else
  emulator::copy_async(shared, global, sizeof(Vec4));
#endif
}
TANDEM_DEVICE void copy_async(float* shared, const float* global) {
#if TANDEM_ON_DEVICE
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
#else
  emulator::copy_async(shared, global, sizeof(float));
#endif
}
/// Copies 16 bytes, or zeros unless they exist: nothing is read then.
TANDEM_DEVICE void copy_async_or_zero(Vec4* shared, const Vec4* global, bool exists) {
#if TANDEM_ON_DEVICE
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(exists ? 16 : 0)
               : "memory");
#else
  emulator::copy_async(shared, exists ? global : nullptr, sizeof(Vec4));
#endif
}
TANDEM_DEVICE void wait_for_copies() {
#if TANDEM_ON_DEVICE
  asm volatile("cp.async.wait_all;" ::: "memory");
#else
  emulator::wait_for_copies();
#endif
}
/// Makes the copies that this thread has started since the last call a group, which may be empty.
TANDEM_DEVICE void commit_copies() {
#if TANDEM_ON_DEVICE
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emulator::commit_copies();
#endif
}
/// Waits until at most the last `pending` of this thread's groups are under way.
template <int pending>
TANDEM_DEVICE void wait_for_copy_groups() {
#if TANDEM_ON_DEVICE
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#else
  emulator::wait_for_copy_groups(pending);
#endif
}

/// Loads four 8x8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8, and
/// has columns 2 (l % 4), + 1 of row l / 4 of each.
TANDEM_DEVICE void ldmatrix_x4(const void* row, u32 (&d)[4]) {
#if TANDEM_ON_DEVICE
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(row))
               : "memory");
#else
  emulator::ldmatrix_x4(row, d);
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
/// As stmatrix_x4, transposed: lane l has rows 2 (l % 4), + 1 of column l / 4 of each.
TANDEM_DEVICE void stmatrix_x4_transposed(void* row, u32 a, u32 b, u32 c, u32 d) {
#if TANDEM_ON_DEVICE
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
#else
  emulator::stmatrix_x4_transposed(row, a, b, c, d);
#endif
}

}  // namespace tandem::ptx
