// Philox4x32-10 by lanes, and which entries of P dropout keeps.
#pragma once

#include "cpu/functions/lanes.hpp"
#include "problem/dropout.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// The high halves of the 64-bit products of all lanes with a number.
TANDEM_INLINE UVec multiply_high(UVec x, std::uint32_t factor) {
  const hn::RepartitionToWide<ULanes> wide;
  const UVec factors = hn::Set(u32_lanes, factor);
  const auto even = hn::MulEven(x, factors);
  const UVec odd_lanes = hn::BitCast(u32_lanes, hn::ShiftRight<32>(hn::BitCast(wide, x)));
  const auto odd = hn::MulEven(odd_lanes, factors);
  return hn::OddEven(hn::BitCast(u32_lanes, odd), hn::BitCast(u32_lanes, hn::ShiftRight<32>(even)));
}

/// Four random words a lane.
struct Philox {
  UVec words[4];

  TANDEM_INLINE Philox run(UVec c0, UVec c1, UVec c2, UVec c3, std::uint32_t k0, std::uint32_t k1) {
    constexpr std::uint32_t m0 = 0xD2511F53U;
    constexpr std::uint32_t m1 = 0xCD9E8D57U;
    for (int round = 0; round < 10; ++round) {
      const UVec high0 = multiply_high(c0, m0);
      const UVec high1 = multiply_high(c2, m1);
      const UVec low0 = hn::Mul(c0, hn::Set(u32_lanes, m0));
      const UVec low1 = hn::Mul(c2, hn::Set(u32_lanes, m1));
      c0 = hn::Xor(hn::Xor(high1, c1), hn::Set(u32_lanes, k0));
      c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(u32_lanes, k1));
      c1 = low1;
      c3 = low0;
      k0 += 0x9E3779B9U;
      k1 += 0xBB67AE85U;
    }
    return {{c0, c1, c2, c3}};
  }
};

/// Writes the lanes whose entry each of the place's keys keeps.
inline void write_kept(const Dropout& d, const FunctionPlace& place, std::uint16_t* lanes) {
  const DropoutPlace of = d.place_of(place.batch);
  const auto load = [](const std::int32_t* p) { return hn::BitCast(u32_lanes, hn::LoadU(i32_lanes, p)); };
  const UVec step = hn::Set(u32_lanes, of.step);
  const UVec query = hn::Add(hn::Set(u32_lanes, of.query), hn::Mul(step, load(place.query)));
  const UVec head = hn::Add(hn::Set(u32_lanes, of.first_head), load(place.head));
  const UVec threshold = hn::Set(u32_lanes, d.threshold);
  std::uint32_t key = of.key + of.step * static_cast<std::uint32_t>(place.first_key);
  for (int j = 0; j < place.keys;) {
    const std::uint32_t four = key / 4;
    const Philox random =
        Philox::run(hn::Set(u32_lanes, four), query, head, hn::Set(u32_lanes, d.offset), d.key[0], d.key[1]);
    do {
      const auto kept = hn::Not(hn::Lt(random.words[key % 4], threshold));
      lanes[j] = lane_bits(hn::VecFromMask(i32_lanes, hn::RebindMask(i32_lanes, kept)));
      ++j;
      key += of.step;
    } while (key / 4 == four && j < place.keys);
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
