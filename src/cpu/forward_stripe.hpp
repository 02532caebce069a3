// What a tile of queries is cut into: stripes of rows, which lie in the lanes, and blocks of keys.
#pragma once

#include "cpu/simd/math.hpp"

namespace tandem::cpu::TANDEM_TARGET {
/// Registers of lanes in a register tile, and rows for each number of them: 16 accumulators, or what 16
/// registers hold.
constexpr int stripe_vecs = vec_registers == 32 ? 4 : 3;
constexpr int stripe_lanes = stripe_vecs * vec_lanes;
constexpr int tile_rows(int vecs) {
  return vec_registers == 32 && vecs < 4 ? 8 : 4;
}

/// Consecutive keys of a block that the same registers [first_vec, last_vec) of a stripe see.
struct Segment {
  int begin;
  int end;
  int first_vec;
  int last_vec;
};

/// Keys [begin, begin + count) of the sequence, and where their operands are.
template <typename Math>
struct Block {
  std::int64_t begin = 0;
  int count = 0;
  const typename Math::Word* k;
  std::int64_t k_stride;
  const typename Math::Word* v;
  std::int64_t v_stride;
};

/// stripe_lanes stacked query rows: lanes past `count` hold zeros and are never stored.
template <typename Math>
struct Stripe {
  int count;
  int vecs;
  typename Math::Word* q;  ///< [word of head_dim_qk][stripe_lanes]
  float* out;              ///< [head_dim_v][stripe_lanes]
  float* maximum;          ///< of s * before (Logits)
  float* sum;              ///< of the exponentials p
  std::int64_t* first_key;
  std::int64_t* last_key;
  std::int64_t begin;  ///< keys [begin, end) are seen by some row ...
  std::int64_t end;
  std::int64_t all_begin;  ///< ... and [all_begin, all_end) by every row
  std::int64_t all_end;
};

/// How raw products become exponents: p = 2^((s * before - maximum) * after), after the softcap if there is
/// one. With fused multiply-add all of the factor comes before, and the product is not rounded; without, it
/// comes after, since rounding s * before would cost every exponent 2^-24 of the logit.
struct Logits {
  float before;
  float after;
  float cap_in;   ///< softcap: s becomes cap_out * tanh(s * cap_in)
  float cap_out;  ///< 0: no softcap
};

}  // namespace tandem::cpu::TANDEM_TARGET
