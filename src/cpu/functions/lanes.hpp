// Which lanes see a key, as bits: what a mask function leaves for the kernels.
#pragma once

#include "cpu/functions/kernel.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// A mask function's value for each key; without a function it is true.
TANDEM_INLINE FunctionSource evaluate_mask(const FunctionProgram* mask, const FunctionPlace& place,
                                           float* memory) {
  if (mask == nullptr) return {nullptr, 0, false};
  evaluate(*mask, place, memory);
  return source_of(mask->value, place, memory);
}

/// All bits of the lanes that see key `j` of an evaluation.
TANDEM_INLINE IVec visible_lanes(const FunctionSource& visible, int j) {
  return visible.p == nullptr ? hn::Set(i32_lanes, -1) : hn::BitCast(i32_lanes, fetch(visible, j));
}

/// A bit for each lane that is not 0.
TANDEM_INLINE std::uint16_t lane_bits(IVec lanes) {
  std::uint8_t bytes[8] = {};
  hn::StoreMaskBits(i32_lanes, hn::Ne(lanes, hn::Zero(i32_lanes)), bytes);
  return static_cast<std::uint16_t>(bytes[0] | bytes[1] << 8);
}

/// The inverse. Eight bytes from `bits` on can be read.
TANDEM_INLINE Mask mask_of(const std::uint16_t* bits) {
  return hn::LoadMaskBits(f32_lanes, reinterpret_cast<const std::uint8_t*>(bits));
}

/// What some registers of rows see of some keys.
struct SeenLanes {
  int first = 0;  ///< keys [first, last) are those between the first and last that a lane sees
  int last = 0;   ///< 0: none
  std::uint16_t always = 0xFFFF;  ///< lanes that see every key

  [[gnu::always_inline]] void add(std::uint16_t lanes, int key) {
    always = static_cast<std::uint16_t>(always & lanes);
    if (lanes == 0) return;
    if (last == 0 || key < first) first = key;
    if (key >= last) last = key + 1;
  }
};

/// Writes the lanes, of those in `rows`, that see each of `count` keys, the first of which is `key`.
/// `window(j)` has all bits of the lanes whose window has key j; `whole`: it has for all keys.
template <typename Window>
TANDEM_INLINE void write_lanes(const FunctionSource& visible, int count, std::uint16_t rows, bool whole,
                               Window window, int key, std::uint16_t* lanes, SeenLanes& seen) {
  // Most blocks of most masks are seen by all or by none.
  IVec every = hn::Set(i32_lanes, -1);
  IVec any = hn::Zero(i32_lanes);
  for (int j = 0; whole && j < count; ++j) {
    const IVec v = visible_lanes(visible, j);
    every = hn::And(every, v);
    any = hn::Or(any, v);
  }
  const auto all = static_cast<std::uint16_t>(lane_bits(every) & rows);
  if (whole && (all == rows || (lane_bits(any) & rows) == 0)) {
    const std::uint16_t each = all == rows ? rows : 0;
    for (int j = 0; j < count; ++j) lanes[j] = each;
    seen.add(each, key);
    seen.add(each, key + count - 1);
    return;
  }
  for (int j = 0; j < count; ++j) {
    IVec v = visible_lanes(visible, j);
    if (!whole) v = hn::And(v, window(j));
    seen.add(lanes[j] = static_cast<std::uint16_t>(lane_bits(v) & rows), key + j);
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
