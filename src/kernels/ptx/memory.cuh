// Global memory accesses and atomics. Every address goes through here, so that the emulator can check its
// bounds.
#pragma once

#include "kernels/ptx/base.cuh"

namespace tandem::ptx {

struct alignas(16) Vec4 {
  u32 x, y, z, w;
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
