// The scratch memory that a short query has for each KV head.
#pragma once

#include "cpu/forward/tile.hpp"

namespace tandem::cpu {

/// Columns rounded up to those of a cache line of 8-bit values.
[[gnu::always_inline]] inline std::size_t in_lines(int columns) {
  return (static_cast<std::size_t>(columns) + 63) / 64 * 64;
}

/// ShortScratch, and behind it what lies in tiles of a matrix unit, as offsets in bytes.
struct DecodeScratch : ShortScratch {
  std::size_t q_tiles = 0;
  std::size_t out_tiles = 0;  ///< O of a run of keys
};

[[gnu::always_inline]] inline DecodeScratch decode_scratch(int head_dim_qk, int head_dim_v) {
  DecodeScratch s{short_scratch(head_dim_qk, head_dim_v)};
  s.q_tiles = whole_lines(s.bytes);
  s.out_tiles = s.q_tiles + short_rows * in_lines(head_dim_qk) * sizeof(float);
  s.bytes = s.out_tiles + 2 * short_rows * in_lines(head_dim_v) * sizeof(float);
  return s;
}

}  // namespace tandem::cpu
