// Exchange inside a warp.
#pragma once

#include "ptx/base.cuh"

namespace tandem::ptx {

/// The value that lane (own ^ mask) passes. All 32 lanes take part.
TANDEM_DEVICE u32 shuffle_xor(u32 value, int mask) {
#if TANDEM_ON_DEVICE
  return __shfl_xor_sync(0xffffffffU, value, mask);
#else
  return emulator::shuffle_xor(value, mask);
#endif
}
TANDEM_DEVICE float shuffle_xor(float value, int mask) {
#if TANDEM_ON_DEVICE
  return __shfl_xor_sync(0xffffffffU, value, mask);
#else
  return emulator::shuffle_xor(value, mask);
#endif
}

/// The value that `lane` passes, on every lane. On hardware the result is in a uniform register.
TANDEM_DEVICE u32 shuffle(u32 value, int lane) {
#if TANDEM_ON_DEVICE
  return __shfl_sync(0xffffffffU, value, lane);
#else
  return emulator::shuffle(value, lane);
#endif
}

TANDEM_DEVICE float shuffle(float value, int lane) {
#if TANDEM_ON_DEVICE
  return __shfl_sync(0xffffffffU, value, lane);
#else
  return __builtin_bit_cast(float, emulator::shuffle(__builtin_bit_cast(u32, value), lane));
#endif
}

/// A value that is the same on all lanes. The shuffle lets ptxas know that it is.
TANDEM_DEVICE int warp_uniform(int value) {
  return static_cast<int>(shuffle(static_cast<u32>(value), 0));
}
/// This warp's number in its CTA.
TANDEM_DEVICE int warp_index() {
  return warp_uniform(static_cast<int>(thread_index() / warp_size));
}

/// The value that lane (own - delta) passes; own where there is none.
TANDEM_DEVICE u32 shuffle_up(u32 value, int delta) {
#if TANDEM_ON_DEVICE
  return __shfl_up_sync(0xffffffffU, value, delta);
#else
  return emulator::shuffle_up(value, delta);
#endif
}

/// Bitwise or over the warp.
TANDEM_DEVICE u32 reduce_or(u32 value) {
#if TANDEM_ON_DEVICE
  return __reduce_or_sync(0xffffffffU, value);
#else
  return emulator::reduce_or(value);
#endif
}

/// Whether `value` is true on any lane. A ballot's mask would have to be tested after the vote.
TANDEM_DEVICE bool any_lane(bool value) {
#if TANDEM_ON_DEVICE
  return __any_sync(0xffffffffU, value);
#else
  return emulator::ballot(value) != 0;
#endif
}

/// Index of the lowest bit set; `bits` is not 0.
TANDEM_DEVICE int find_first_set(u32 bits) {
#if TANDEM_ON_DEVICE
  return __ffs(static_cast<int>(bits)) - 1;
#else
  return __builtin_ctz(bits);
#endif
}

/// Index of the highest bit set; `bits` is not 0.
TANDEM_DEVICE int highest_bit(u32 bits) {
#if TANDEM_ON_DEVICE
  return 31 - __clz(static_cast<int>(bits));
#else
  return 31 - __builtin_clz(bits);
#endif
}

/// How many bits are set.
TANDEM_DEVICE u32 count_bits(u32 bits) {
#if TANDEM_ON_DEVICE
  return static_cast<u32>(__popc(bits));
#else
  return static_cast<u32>(__builtin_popcount(bits));
#endif
}

/// The predicates of all lanes, one bit each.
TANDEM_DEVICE u32 ballot(bool predicate) {
#if TANDEM_ON_DEVICE
  return __ballot_sync(0xffffffffU, predicate);
#else
  return emulator::ballot(predicate);
#endif
}

TANDEM_DEVICE void sync_warp() {
#if TANDEM_ON_DEVICE
  __syncwarp();
#else
  emulator::sync_warp();
#endif
}

/// True on exactly one lane of the (converged) warp.
TANDEM_DEVICE bool elect_one() {
#if TANDEM_ON_DEVICE
  u32 elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
  return elected != 0;
#else
  return emulator::elect_one();
#endif
}

}  // namespace tandem::ptx
