// What every device file needs: fixed-width names, function qualifiers, and where a thread is.
//
// A function in ptx/ that is inline assembly has a second body, a call into the emulator
// (tests/kernels/emulator), which runs kernels as host C++ and checks what hardware hides. Of CUDA's own
// functions the emulator has others with the same names (intrinsics.hpp).
#pragma once

#if defined(__CUDACC_RTC__)
#define TANDEM_ON_DEVICE 1
#define TANDEM_DEVICE __device__ __forceinline__
#define TANDEM_KERNEL __global__ void
#else
#define TANDEM_ON_DEVICE 0
#define TANDEM_DEVICE inline
#define TANDEM_KERNEL inline void
#define __grid_constant__
#define __launch_bounds__(...)
#include "emulator.hpp"
#endif

namespace tandem {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

constexpr int warp_size = 32;
constexpr int warpgroup_size = 128;

TANDEM_DEVICE constexpr i64 ceil_div(i64 a, i64 b) {
  return (a + b - 1) / b;
}
TANDEM_DEVICE constexpr int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}
template <typename T>
TANDEM_DEVICE constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
TANDEM_DEVICE constexpr T max(T a, T b) {
  return a < b ? b : a;
}

namespace ptx {

/// Index of this thread in its block.
TANDEM_DEVICE u32 thread_index() {
#if TANDEM_ON_DEVICE
  return threadIdx.x;
#else
  return emulator::thread_index();
#endif
}
/// Index of this thread, read again at each call, so that ptxas does not keep what is computed from it in
/// registers around a loop. (The mask tells the compiler that the index is not negative as an int.)
TANDEM_DEVICE u32 thread_index_anew() {
#if TANDEM_ON_DEVICE
  u32 x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x & 1023U;
#else
  return emulator::thread_index();
#endif
}

/// A number of which the compiler knows nothing more: what was made from it before is made again, where it
/// would take registers from there to here.
TANDEM_DEVICE int forgotten(int x) {
#if TANDEM_ON_DEVICE
  asm volatile("" : "+r"(x));
#endif
  return x;
}

/// An address of which it knows nothing more: what is added to it is not gathered with what it was made from.
template <typename T>
TANDEM_DEVICE T* forgotten(T* p) {
#if TANDEM_ON_DEVICE
  asm volatile("" : "+l"(p));
#endif
  return p;
}

/// Index of this thread in its warp, read again at each call.
TANDEM_DEVICE u32 lane_index_anew() {
#if TANDEM_ON_DEVICE
  u32 x;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(x));
  return x & (warp_size - 1);
#else
  return emulator::thread_index() % warp_size;
#endif
}

/// Index of this CTA in the grid, and the number of CTAs.
TANDEM_DEVICE u32 block_index() {
#if TANDEM_ON_DEVICE
  return blockIdx.x;
#else
  return emulator::block_index();
#endif
}
TANDEM_DEVICE u32 grid_size() {
#if TANDEM_ON_DEVICE
  return gridDim.x;
#else
  return emulator::grid_size();
#endif
}
/// The number of CTAs, read again at each call.
TANDEM_DEVICE u32 grid_size_anew() {
#if TANDEM_ON_DEVICE
  u32 x;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(x));
  return x;
#else
  return emulator::grid_size();
#endif
}

/// The address in the shared memory of block `rank` of the cluster that corresponds to `p` in this one's.
TANDEM_DEVICE u32 cluster_address(const void* p, [[maybe_unused]] u32 rank) {
#if TANDEM_ON_DEVICE
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(static_cast<u32>(__cvta_generic_to_shared(p))), "r"(rank));
  return address;
#else
  return emulator::shared_address(p);
#endif
}
/// In that of the other block of a cluster of two.
TANDEM_DEVICE u32 other_shared_address(const void* p) {
  return cluster_address(p, block_index() % 2 ^ 1);
}

/// The block's dynamic shared memory, 1024-byte aligned as 128-byte swizzled tiles need it.
TANDEM_DEVICE char* dynamic_shared() {
#if TANDEM_ON_DEVICE
  extern __shared__ __align__(1024) char shared_memory[];
  return shared_memory;
#else
  return emulator::dynamic_shared();
#endif
}

/// Address in the shared window, as instructions take it.
TANDEM_DEVICE u32 shared_address(const void* p) {
#if TANDEM_ON_DEVICE
  return static_cast<u32>(__cvta_generic_to_shared(p));
#else
  return emulator::shared_address(p);
#endif
}

}  // namespace ptx
}  // namespace tandem
