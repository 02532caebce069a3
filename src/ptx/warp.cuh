// Exchange inside a warp.
#pragma once

#include "ptx/base.cuh"

namespace tandem::ptx {

/// The value that lane (own ^ mask) passes. All 32 lanes take part.
template <typename T>
TANDEM_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffU, value, mask);
}

/// The value that `lane` passes, on every lane. On hardware the result is in a uniform register.
template <typename T>
TANDEM_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffU, value, lane);
}

/// The value that lane `lane` of the own group of `width` lanes passes. A constant lane takes no register.
template <int width, typename T>
TANDEM_DEVICE T shuffle_within(T value, int lane) {
  return __shfl_sync(0xffffffffU, value, lane, width);
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
  return __shfl_up_sync(0xffffffffU, value, delta);
}

/// Bitwise or over the warp.
TANDEM_DEVICE u32 reduce_or(u32 value) {
  return __reduce_or_sync(0xffffffffU, value);
}

/// The largest over the warp.
TANDEM_DEVICE u32 reduce_max(u32 value) {
  return __reduce_max_sync(0xffffffffU, value);
}

/// Whether `value` is true on any lane. A ballot's mask would have to be tested after the vote.
TANDEM_DEVICE bool any_lane(bool value) {
  return __any_sync(0xffffffffU, value);
}

/// Index of the lowest bit set; `bits` is not 0.
TANDEM_DEVICE int find_first_set(u32 bits) {
  return __ffs(static_cast<int>(bits)) - 1;
}

/// Index of the highest bit set; `bits` is not 0.
TANDEM_DEVICE int highest_bit(u32 bits) {
  return 31 - __clz(static_cast<int>(bits));
}

/// How many bits are set.
TANDEM_DEVICE u32 count_bits(u32 bits) {
  return static_cast<u32>(__popc(bits));
}

/// The predicates of all lanes, one bit each.
TANDEM_DEVICE u32 ballot(bool predicate) {
  return __ballot_sync(0xffffffffU, predicate);
}

TANDEM_DEVICE void sync_warp() {
  __syncwarp();
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
