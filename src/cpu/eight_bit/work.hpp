// What one tile of queries in 8 bits is computed with: its scratch memory, its stripes and its blocks of
// keys.
#pragma once

#include "cpu/eight_bit/tile.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/simd/matrix_unit.hpp"

namespace tandem::cpu::TANDEM_TARGET::eight_bit {

constexpr int stripe_vecs = vec_registers == 32 && !has_matrix_unit ? 4 : 2;
constexpr int stripe_lanes = stripe_vecs * vec_lanes;
static_assert(quant_block % stripe_lanes == 0 && stripe_lanes <= 64);

/// The tile's scratch memory, taken apart.
struct Scratch {
  float *q, *out, *held, *scores, *k, *v;
  std::uint8_t* quantized;
  float *v_reference, *v_ratio;            ///< by channel of V
  float *q_scale, *shift, *maximum, *sum;  ///< by query row
  float *growth, *pending, *factor;        ///< by query row
  float* largest;                          ///< by query row: the largest logit, which maximum may lag behind
  std::byte* totals;                       ///< sums over runs of keys
};

struct Work {
  const EightBitTile& tile;
  const ForwardTile& t;
  Scratch s;
  bool truncates;  ///< products are e4m3's
  /// The exponent's reference follows the running maximum only when that is too far above it. Otherwise P is
  /// in units of its largest value in the tile.
  bool lazy_rescaling;
  bool p_linear;  ///< half of P's exponentials are linear within an octave
};

/// Which keys the rows of one stripe see: [begin, end) some row, [all_begin, all_end) every row.
struct Stripe {
  int index;
  int count;
  std::int64_t begin;
  std::int64_t end;
  std::int64_t all_begin;
  std::int64_t all_end;
  std::int64_t first[stripe_lanes];
  std::int64_t last[stripe_lanes];
};

/// Keys [begin, begin + count). The products of several blocks may be held until they are promoted.
struct KeyBlock {
  std::int64_t begin;
  int count;
  bool opens;   ///< nothing is held yet
  bool closes;  ///< what is held is promoted now
};

inline Scratch scratch_of(const ForwardTile& t, bool on_unit) {
  const EightBitScratch layout = eight_bit_scratch(t.head_dim_qk, t.head_dim_v, t.block_q, on_unit);
  auto* const base = reinterpret_cast<float*>(t.scratch);
  Scratch s{};
  s.q = base + layout.q;
  s.out = base + layout.out;
  s.held = base + layout.held;
  s.scores = base + layout.scores;
  s.k = base + layout.k;
  s.v = base + layout.v;
  s.quantized = reinterpret_cast<std::uint8_t*>(base + layout.quantized);
  s.v_reference = base + layout.channels;
  s.v_ratio = s.v_reference + t.head_dim_v;
  float* rows = base + layout.rows;
  for (float** field :
       {&s.q_scale, &s.shift, &s.maximum, &s.sum, &s.growth, &s.pending, &s.factor, &s.largest}) {
    *field = rows;
    rows += t.block_q;
  }
  s.totals = reinterpret_cast<std::byte*>(base + layout.totals);
  return s;
}

/// A row's scale: NaN if its sign says that the row has a NaN marker, so that all its logits are NaN.
TANDEM_INLINE float scale_of_row(float scale) {
  return __builtin_signbit(scale) != 0 ? __builtin_nanf("") : scale;
}

}  // namespace tandem::cpu::TANDEM_TARGET::eight_bit
