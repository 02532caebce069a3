// Moving registers between warpgroups. The count is a multiple of 8, 24 to 256; every warp of the warpgroup
// executes it.
#pragma once

#include "ptx/base.cuh"

namespace tandem::ptx {

template <int count>
TANDEM_DEVICE void release_registers() {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256);
#if TANDEM_ON_DEVICE
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
#else
  emulator::release_registers(count);
#endif
}

template <int count>
TANDEM_DEVICE void claim_registers() {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256);
#if TANDEM_ON_DEVICE
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
#else
  emulator::claim_registers(count);
#endif
}

}  // namespace tandem::ptx
