// The Tensor Memory Accelerator (TMA): boxes of a tensor between global and shared memory, described by a
// tensor map. Coordinates go from the innermost dimension outwards. What lies outside the tensor reads as
// zero and is not written.
#pragma once

#include "config/types.hpp"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

namespace tandem::ptx {

/// How long the L2 should keep what is read (the driver's encodings of createpolicy.fractional).
enum class CacheHint : u64 {
  normal = 0x1000000000000000,
  first = 0x12F0000000000000,
  last = 0x14F0000000000000
};

TANDEM_DEVICE void prefetch_tensor_map(const TensorMap& map) {
#if TANDEM_ON_DEVICE
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#else
  (void)map;
#endif
}

/// Starts reading a box at (c0, c1, c2, c3) into shared memory; its bytes are credited to `bar`. One thread.
TANDEM_DEVICE void tma_load(void* shared, const TensorMap& map, Mbarrier& bar, i32 c0, i32 c1, i32 c2, i32 c3,
                            CacheHint hint) {
#if TANDEM_ON_DEVICE
  trace_at(TraceEvent::load, &bar);
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(static_cast<u64>(hint))
      : "memory");
#else
  (void)hint;
  emulator::tma_load(shared, map, &bar, c0, c1, c2, c3);
#endif
}

/// Brings the box to the L2. One thread.
TANDEM_DEVICE void tma_prefetch(const TensorMap& map, i32 c0, i32 c1, i32 c2, i32 c3) {
#if TANDEM_ON_DEVICE
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(c0),
               "r"(c1), "r"(c2), "r"(c3)
               : "memory");
#else
  (void)map, (void)c0, (void)c1, (void)c2, (void)c3;
#endif
}

/// Loads into both blocks of a cluster of two: to `shared` of each, credited to `bar` of each. What the
/// box replaces is free in both.
TANDEM_DEVICE void tma_load_both(void* shared, const TensorMap& map, Mbarrier& bar, i32 c0, i32 c1, i32 c2,
                                 i32 c3, CacheHint hint) {
#if TANDEM_ON_DEVICE
  trace_at(TraceEvent::load, &bar);
  constexpr u16 both = 3;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(both),
      "l"(static_cast<u64>(hint))
      : "memory");
#else
  (void)hint;
  emulator::tma_load_both(shared, map, &bar, c0, c1, c2, c3);
#endif
}

/// Starts writing a box from shared memory (written before a fence_async_shared and a barrier). One thread.
TANDEM_DEVICE void tma_store(const TensorMap& map, const void* shared, i32 c0, i32 c1, i32 c2, i32 c3) {
#if TANDEM_ON_DEVICE
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
#else
  emulator::tma_store(map, shared, c0, c1, c2, c3);
#endif
}

/// As tma_store, but adds f32 values to global memory.
TANDEM_DEVICE void tma_reduce_add(const TensorMap& map, const void* shared, i32 c0, i32 c1, i32 c2, i32 c3) {
#if TANDEM_ON_DEVICE
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(&map),
      "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
#else
  emulator::tma_reduce_add(map, shared, c0, c1, c2, c3);
#endif
}

/// Starts copying `bytes` (a multiple of 16, as are both addresses) into shared memory; credited to `bar`.
/// One thread.
TANDEM_DEVICE void bulk_load(void* shared, const void* global, u32 bytes, Mbarrier& bar) {
#if TANDEM_ON_DEVICE
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&bar))
      : "memory");
#else
  emulator::bulk_load(shared, global, bytes, &bar);
#endif
}

/// Starts copying `bytes` from shared memory (as for tma_store) to `target` of the other block of a cluster
/// of two; credited to its `bar`. One thread.
TANDEM_DEVICE void bulk_send(void* target, const void* source, u32 bytes, Mbarrier& bar) {
#if TANDEM_ON_DEVICE
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          other_shared_address(target)),
      "r"(shared_address(source)), "r"(bytes), "r"(other_shared_address(&bar))
      : "memory");
#else
  emulator::bulk_send(target, source, bytes, &bar);
#endif
}

/// Starts storing to what corresponds to `target` in block `rank` of the cluster; credited to `bar` there.
/// What that block sends when it has waited for it comes behind all that this thread has read before.
TANDEM_DEVICE void store_async(u32 rank, Float4* target, const Float4& value, Mbarrier& bar) {
#if TANDEM_ON_DEVICE
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          cluster_address(target, rank)),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(cluster_address(&bar, rank))
      : "memory");
#else
  emulator::store_async(rank, target, &value, sizeof(value), &bar);
#endif
}
TANDEM_DEVICE void store_async(u32 rank, Float2* target, const Float2& value, Mbarrier& bar) {
#if TANDEM_ON_DEVICE
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                   cluster_address(target, rank)),
               "f"(value.x), "f"(value.y), "r"(cluster_address(&bar, rank))
               : "memory");
#else
  emulator::store_async(rank, target, &value, sizeof(value), &bar);
#endif
}

/// Starts copying `bytes` from shared memory (as for tma_store) to global memory. One thread.
TANDEM_DEVICE void bulk_store(void* global, const void* shared, u32 bytes) {
#if TANDEM_ON_DEVICE
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
#else
  emulator::bulk_store(global, shared, bytes);
#endif
}

/// Starts adding `bytes` of f32 values from shared memory (as for tma_store) to global memory, each once and
/// in no order. One thread.
TANDEM_DEVICE void bulk_reduce_add(float* global, const void* shared, u32 bytes) {
#if TANDEM_ON_DEVICE
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
#else
  emulator::bulk_reduce_add(global, shared, bytes);
#endif
}

/// Groups this thread's stores so far; tma_store_wait waits until at most `pending` groups still read shared
/// memory.
TANDEM_DEVICE void tma_store_commit() {
#if TANDEM_ON_DEVICE
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
  emulator::tma_store_commit();
#endif
}
/// As tma_store_wait, until they have also been written to global memory.
template <int pending>
TANDEM_DEVICE void tma_store_wait_written() {
#if TANDEM_ON_DEVICE
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
#else
  emulator::tma_store_wait_written(pending);
#endif
}
template <int pending>
TANDEM_DEVICE void tma_store_wait() {
#if TANDEM_ON_DEVICE
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
#else
  emulator::tma_store_wait(pending);
#endif
}

}  // namespace tandem::ptx
