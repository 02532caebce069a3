// Timestamps, for `tandem trace` on a GPU. They are in a kernel only if the file that is compiled defines
// TANDEM_TRACED, as ops/forward/sm90/traced_forward.cuh does; in all others these functions are empty.
#pragma once

#include "config/trace.hpp"
#include "ptx/base.cuh"

#if TANDEM_ON_DEVICE && defined(TANDEM_TRACED)
extern "C" {
__constant__ tandem::TraceTarget tandem_trace_target;
}
#endif

namespace tandem::ptx {

/// One thread, before the first barrier of the block: no warp has a record.
TANDEM_DEVICE void trace_init() {
#if TANDEM_ON_DEVICE && defined(TANDEM_TRACED)
  u32 bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  u32* const counters = reinterpret_cast<u32*>(dynamic_shared() + bytes - trace_shared_bytes);
  for (int i = 0; i < trace_shared_bytes / 4; ++i) counters[i] = 0;
#endif
}

/// Writes a record of the calling warp: the lowest active lane does. No branch, so that ptxas may still leave
/// products in flight across it.
TANDEM_DEVICE void trace(TraceEvent event, u32 thing = 0) {
#if TANDEM_ON_DEVICE && defined(TANDEM_TRACED)
  asm volatile(
      "{\n"
      ".reg .pred writes, fits;\n"
      ".reg .b32 now, lanes, own, block, warp, counter, number;\n"
      ".reg .b64 at;\n"
      "mov.u32 now, %%clock;\n"
      "activemask.b32 lanes;\n"
      "neg.s32 own, lanes;\n"
      "and.b32 lanes, lanes, own;\n"
      "mov.u32 own, %%lanemask_eq;\n"
      "setp.eq.u32 writes, lanes, own;\n"
      "mov.u32 block, %%ctaid.x;\n"
      "setp.eq.and.u32 writes, block, %2, writes;\n"
      "mov.u32 warp, %%tid.x;\n"
      "shr.u32 warp, warp, 5;\n"
      "mov.u32 counter, %%dynamic_smem_size;\n"
      "add.u32 counter, counter, %1;\n"
      "mad.lo.u32 counter, warp, 4, counter;\n"
      "mov.u32 number, 0;\n"
      "@writes ld.shared.u32 number, [counter];\n"
      "setp.lt.and.u32 fits, number, %3, writes;\n"
      "mad.lo.u32 warp, warp, %3, number;\n"
      "mad.wide.u32 at, warp, 8, %4;\n"
      "@fits st.global.v2.u32 [at], {now, %0};\n"
      "add.u32 number, number, 1;\n"
      "@writes st.shared.u32 [counter], number;\n"
      "}" ::"r"(static_cast<u32>(event) << 24 | thing),
      "r"(shared_address(dynamic_shared()) - trace_shared_bytes), "r"(tandem_trace_target.block),
      "r"(tandem_trace_target.records_a_warp), "l"(tandem_trace_target.records)
      : "memory");
#else
  static_cast<void>(event);
  static_cast<void>(thing);
#endif
}

/// Writes a record of what lies at `shared`.
TANDEM_DEVICE void trace_at(TraceEvent event, const void* shared) {
#if TANDEM_ON_DEVICE && defined(TANDEM_TRACED)
  trace(event, shared_address(shared) - shared_address(dynamic_shared()));
#else
  static_cast<void>(event);
  static_cast<void>(shared);
#endif
}

}  // namespace tandem::ptx
