// Transaction barriers in shared memory: phases, arrivals, and bytes that TMA still owes.
#pragma once

#include "ptx/trace.cuh"

namespace tandem::ptx {

/// 64 bits of shared memory that only the functions below touch.
struct Mbarrier {
  u64 state;
};

/// One thread, before any other use; then fence_mbarrier_init and a block (or cluster) barrier.
TANDEM_DEVICE void mbarrier_init(Mbarrier& bar, u32 arrivals) {
#if TANDEM_ON_DEVICE
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&bar)), "r"(arrivals));
#else
  emulator::mbarrier_init(&bar, arrivals);
#endif
}

/// Makes initialised barriers visible to TMA and to the cluster.
TANDEM_DEVICE void fence_mbarrier_init() {
#if TANDEM_ON_DEVICE
  trace_init();
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
  emulator::fence_mbarrier_init();
#endif
}

TANDEM_DEVICE void mbarrier_arrive(Mbarrier& bar) {
#if TANDEM_ON_DEVICE
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&bar)) : "memory");
#else
  emulator::mbarrier_arrive(&bar);
#endif
}

/// Arrives at the same barrier of the other block of a cluster of two.
TANDEM_DEVICE void mbarrier_arrive_other(Mbarrier& bar) {
#if TANDEM_ON_DEVICE
  asm volatile(
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(other_shared_address(&bar))
      : "memory");
#else
  emulator::mbarrier_arrive_other(&bar);
#endif
}

/// Arrives where this block has only read what copies of the other then replace: no memory has to become
/// visible, and mbarrier_wait waits for it. On sm_90 ptxas makes of .release.cluster a fence of all memory
/// (MEMBAR.ALL.GPU), and of .acquire.cluster an invalidation of the L1 (CCTL.IVALL).
TANDEM_DEVICE void mbarrier_release_other(Mbarrier& bar) {
#if TANDEM_ON_DEVICE
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(other_shared_address(&bar)) : "memory");
#else
  emulator::mbarrier_arrive_other(&bar);
#endif
}

/// Arrives and announces `bytes` that copies will bring in this phase.
TANDEM_DEVICE void mbarrier_arrive_expect(Mbarrier& bar, u32 bytes) {
#if TANDEM_ON_DEVICE
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&bar)),
               "r"(bytes)
               : "memory");
#else
  emulator::mbarrier_arrive_expect(&bar, bytes);
#endif
}

#if TANDEM_ON_DEVICE
// clang-format off
#define TANDEM_MBARRIER_WAIT(order)                                              \
  asm volatile("{\n"                                                             \
               ".reg .pred done;\n"                                              \
               "again:\n"                                                        \
               "mbarrier.try_wait.parity" order ".shared::cta.b64 done, [%0], %1;\n" \
               "@done bra ready;\n"                                              \
               "bra again;\n"                                                    \
               "ready:\n"                                                        \
               "}\n" ::"r"(shared_address(&bar)), "r"(parity)                    \
               : "memory")
// clang-format on
#endif

/// Waits until the phase of this parity has completed (a fresh barrier's phase of parity 1 counts as
/// completed).
TANDEM_DEVICE void mbarrier_wait(Mbarrier& bar, u32 parity) {
#if TANDEM_ON_DEVICE
  trace_at(TraceEvent::wait, &bar);
  TANDEM_MBARRIER_WAIT("");
  trace_at(TraceEvent::wait_end, &bar);
#else
  emulator::mbarrier_wait(&bar, parity);
#endif
}

/// Waits where the other block of a cluster arrives, or its copies do: what came before that is visible.
TANDEM_DEVICE void mbarrier_wait_other(Mbarrier& bar, u32 parity) {
#if TANDEM_ON_DEVICE
  trace_at(TraceEvent::wait, &bar);
  TANDEM_MBARRIER_WAIT(".acquire.cluster");
  trace_at(TraceEvent::wait_end, &bar);
#else
  emulator::mbarrier_wait(&bar, parity);
#endif
}

#undef TANDEM_MBARRIER_WAIT

}  // namespace tandem::ptx
