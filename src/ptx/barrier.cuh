// Barriers among threads, and the fences between ordinary accesses and the asynchronous units.
#pragma once

#include "ptx/trace.cuh"

namespace tandem::ptx {

/// All threads of the block.
TANDEM_DEVICE void sync_block() {
  __syncthreads();
}

/// Named barrier 1 to 15 (0 is sync_block's): waits until `threads` threads have arrived or synced.
TANDEM_DEVICE void named_barrier_sync(int id, int threads) {
#if TANDEM_ON_DEVICE
  trace(TraceEvent::join, static_cast<u32>(id));
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
  trace(TraceEvent::join_end, static_cast<u32>(id));
#else
  emulator::named_barrier_sync(id, threads);
#endif
}
/// Arrives without waiting.
TANDEM_DEVICE void named_barrier_arrive(int id, int threads) {
#if TANDEM_ON_DEVICE
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  emulator::named_barrier_arrive(id, threads);
#endif
}

/// Orders ordinary shared-memory accesses before later ones of the tensor cores and TMA: those of this
/// thread, and those of threads that it has met at a barrier. The fence takes long while products of the warp
/// are in flight.
TANDEM_DEVICE void fence_async_shared() {
#if TANDEM_ON_DEVICE
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  emulator::fence_async_shared();
#endif
}

/// Orders what this thread has seen of global memory (a semaphore's count, and all that was written before
/// it) before later accesses of TMA.
TANDEM_DEVICE void fence_async_global() {
#if TANDEM_ON_DEVICE
  asm volatile("fence.proxy.async.global;" ::: "memory");
#else
  emulator::fence_async_global();
#endif
}

/// All threads of the cluster wait for each other. What they wrote before is then visible to all of them.
TANDEM_DEVICE void sync_cluster() {
#if TANDEM_ON_DEVICE
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  emulator::sync_cluster();
#endif
}

/// The two halves of it, for blocks that are only to know of each other that they have begun, and have
/// initialised and fenced their mbarriers: the arrival releases nothing else.
TANDEM_DEVICE void arrive_cluster() {
#if TANDEM_ON_DEVICE
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  emulator::arrive_cluster();
#endif
}
TANDEM_DEVICE void wait_cluster() {
#if TANDEM_ON_DEVICE
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#else
  emulator::wait_cluster();
#endif
}

/// All threads of a cluster of so many blocks.
template <int blocks>
TANDEM_DEVICE void sync_blocks() {
  if constexpr (blocks > 1) {
    sync_cluster();
  } else {
    sync_block();
  }
}

/// Programmatic dependent launch: wait for the grid before this one; let the grid after this one start.
/// Before sm_90 there is none, and nothing to wait for.
TANDEM_DEVICE void wait_for_previous_grid() {
#if TANDEM_ON_DEVICE && __CUDA_ARCH__ < 900
#elif TANDEM_ON_DEVICE
  asm volatile("griddepcontrol.wait;" ::: "memory");
#else
  emulator::wait_for_previous_grid();
#endif
}
TANDEM_DEVICE void launch_next_grid() {
#if TANDEM_ON_DEVICE && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// For grids that may start early, where not every CTA waits: the last one does, so that this grid ends
/// behind the one before, and what waits for this grid's end sees what both have written.
TANDEM_DEVICE void outlast_previous_grid() {
  if (block_index() + 1 == grid_size()) wait_for_previous_grid();
}

}  // namespace tandem::ptx
