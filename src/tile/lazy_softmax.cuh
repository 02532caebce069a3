// Online softmax with lazy rescaling and without maxima: P is in units of 2^reference, and the reference
// moves only when P grows too large, which the sums tell that are needed anyway.
#pragma once

#include "ops/eight_bit/config.hpp"
#include "ptx/eight_bit.cuh"
#include "tile/softmax.cuh"

namespace tandem::tile {

/// The approximation of 2^x that is linear within an octave, from 1536 + x. That sum has linear_exp2_bits of
/// x behind the point, and its last bits become exponent and mantissa of the result. The result is 0 below
/// 2^-127, and infinite where 2^x exceeds f32 or x is NaN. It is also infinite for x from -3072 to -1536,
/// where the integer sum may wrap around.
constexpr float linear_exp2_start = 1536.0F;
TANDEM_DEVICE float linear_exp2(float shifted) {
  constexpr i32 start_bits = 0x44C00000;
  static_assert(linear_exp2_bits == 13);
  constexpr i32 zero = (127 << linear_exp2_bits) - linear_exp2_offset;
  constexpr i32 infinity = 255 << linear_exp2_bits;
  const auto bits = static_cast<i32>(ptx::bits_of(shifted));
  return ptx::float_of(static_cast<u32>(ptx::add_min_relu(bits, zero - start_bits, infinity))
                       << (23 - linear_exp2_bits));
}

/// Two rows a thread (h = 0, 1); all logarithms are to base 2. O, the sums and P are in units of 2^reference.
/// All P are positive, so a sum bounds each of its terms: if eight of them come to no more than e4m3's
/// largest number, all are in its range. A tile then takes one vote instead of maxima, shuffles and weights,
/// which are a fifth of its instructions and its longest dependency chain.
///
/// Whether a row's reference moves depends on that row alone, and so does its P. The exception is a warp of
/// which a row's P has overflowed: P of all its rows is computed again, without linear exponentials.
///
/// `linear`: half of the exponentials are linear within an octave (takes_linear_exp2). They take two
/// instructions instead of eight cycles of the special function unit.
template <bool linear>
struct LazySoftmax {
  /// A reference that moves is put so far below its row's maximum that P is at most 28: eight such sum to
  /// 224.
  static constexpr float below = e4m3_lazy_p_range_log2;
  static constexpr float largest_sum = 448.0F;
  /// Beyond this P is computed again: 1 / P would be no normal number, or P is infinite.
  static constexpr float largest_kept = 0x1p120F;
  /// By how much a known maximum may exceed the reference: P is then at most 448.
  static constexpr float headroom = below + lazy_headroom_log2;

  /// The reference of a row before its first key. It is not -inf, since -inf - -inf is NaN.
  static constexpr float nothing_seen = -3e38F;

  float reference[2];
  float sum[2];     ///< over this thread's columns
  float weight[2];  ///< weight of the products of the P in registers
  float tile_sum[2];
  float largest[2];  ///< the largest of the tile's sums of eight

  TANDEM_DEVICE void reset() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[h] = nothing_seen;
      sum[h] = weight[h] = 0.0F;
    }
  }

  [[nodiscard]] TANDEM_DEVICE bool has_seen_none(int h) const {
    return reference[h] == nothing_seen;
  }

  /// The maximum of the scores times their unit, on all lanes of the quad; NaN if a score is.
  template <int n, int factors>
  static TANDEM_DEVICE void find_maximum(float (&maximum)[2], const float (&s)[n],
                                         const float (&factor)[factors]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Four chains a row: a dependent instruction waits eight cycles, an independent one two.
      float a[4] = {s[2 * h], s[2 * h + 1], s[4 + 2 * h], s[4 + 2 * h + 1]};
#pragma unroll
      for (int j = 2; j < n / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          a[j % 2 * 2 + e] = ptx::fmax_nan(a[j % 2 * 2 + e], s[4 * j + 2 * h + e]);
        }
      }
      const float m =
          largest_of_quad_nan(ptx::fmax_nan(ptx::fmax_nan(a[0], a[1]), ptx::fmax_nan(a[2], a[3])));
      maximum[h] = m * factor[h % factors];
    }
  }

  /// For masked scores: moves the references by the tile's maxima, before P is computed.
  template <int n, int factors, typename Scale>
  TANDEM_DEVICE void move_to_maximum(const float (&s)[n], const float (&factor)[factors], Scale scale) {
    float maximum[2];
    find_maximum(maximum, s, factor);
    // A NaN among the scores makes the reference NaN, and with it the row.
    const bool above[2] = {!(maximum[0] - reference[0] <= headroom),
                           !(maximum[1] - reference[1] <= headroom)};
    if (ptx::ballot(above[0] || above[1]) != 0) move_rows(above, maximum, scale);
  }
  /// Moves the references of rows whose P has overflowed by the tile's maxima.
  template <int n, int factors, typename Scale>
  TANDEM_DEVICE void move_lost(const float (&s)[n], const float (&factor)[factors], Scale scale) {
    float maximum[2];
    find_maximum(maximum, s, factor);
    const bool lost[2] = {largest[0] > largest_kept, largest[1] > largest_kept};
    move_rows(lost, maximum, scale);
  }

  /// Turns the scores into P in place, a quarter at a time, and sums it; `beside(i)` is called behind
  /// quarter i.
  ///
  /// The special function unit takes an exponential of a warp every eight cycles. Other instructions fit
  /// between: the arguments of the next quarter, the sums of the one before, and `beside`. ptxas interleaves
  /// them if the source has them in this order.
  ///
  /// `anew`: P is computed again, and no exponential is linear.
  template <bool anew = false, int n, int factors, typename Beside>
  TANDEM_DEVICE void exponentials(float (&s)[n], const float (&factor)[factors], Beside beside) {
    constexpr int size = n / 4;
    const auto is_linear = [](int i) { return linear && !anew && takes_linear_exp2(i / 4 * 8); };
    // P of a row that has seen no key yet is infinite where a key is visible, and is then computed again.
    const float subtract[2] = {reference[0], reference[1]};
    const float start[2] = {linear_exp2_start - subtract[0], linear_exp2_start - subtract[1]};
    const auto argument = [&](int i) {
      const int h = i / 2 % 2;
      s[i] = ptx::fma(s[i], factor[h % factors], is_linear(i) ? start[h] : -subtract[h]);
    };
    static_assert(size == 16);
#pragma unroll
    for (int i = 0; i < size; ++i) argument(i);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
      for (int j = 0; j < size; ++j) {
        const int i = quarter * size + j;
        s[i] = is_linear(i) ? linear_exp2(s[i]) : ptx::exp2(s[i]);
        if (quarter < 3) argument(i + size);
      }
      if (quarter > 0) add_quarter(s, quarter - 1);
      beside(quarter);
    }
    add_quarter(s, 3);
  }
  /// Sets infinite P to 0. For masked scores P is infinite only where a linear exponential should be 0, or in
  /// rows that are NaN.
  template <int n>
  TANDEM_DEVICE void drop_infinite(float (&s)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) s[i] = s[i] == ptx::infinity() ? 0.0F : s[i];
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) add_quarter(s, quarter);
  }

  /// Adds the tile's sums, and passes its P to `take`. If P of a row is too large, the row's reference moves
  /// first, and P, O and the sums are rescaled (`take(P, true)`). If P is infinite, `again` computes the
  /// tile's P anew.
  ///
  /// `apart`: each of the two cases calls `take` itself, and rescaled P is another array. ptxas packs four
  /// e4m3 into a word with two instructions instead of three only if what it packs was written at one place.
  template <bool apart, int n, typename Scale, typename Again, typename Take>
  TANDEM_DEVICE void add_tile(float v_scale, float (&s)[n], Scale scale, Again again, Take take) {
    const bool too_large = largest[0] > largest_sum || largest[1] > largest_sum;
    if constexpr (apart) {
      if (!ptx::any_lane(too_large)) {
        take(s, false);
      } else {
        float moved[n];  // a copy: P is not negative
#pragma unroll
        for (int i = 0; i < n; ++i) moved[i] = ptx::fmax_nan(s[i], 0.0F);
        scale_down(moved, scale, again);
        take(moved, true);
      }
      add_sums(v_scale);
    } else {
      const bool moves = ptx::ballot(too_large) != 0;
      if (moves) scale_down(s, scale, again);
      add_sums(v_scale);
      take(s, moves);
    }
  }

 private:
  /// Adds P of 16 scores to the tile's sums.
  template <int n>
  TANDEM_DEVICE void add_quarter(const float (&s)[n], int quarter) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = quarter * 16 + 2 * h;
      const float eight = ((s[at] + s[at + 1]) + (s[at + 4] + s[at + 5])) +
                          ((s[at + 8] + s[at + 9]) + (s[at + 12] + s[at + 13]));
      tile_sum[h] = quarter == 0 ? eight : tile_sum[h] + eight;
      largest[h] = quarter == 0 ? eight : ptx::fmax(largest[h], eight);
    }
  }
  /// Rescales rows whose P is too large, so that their largest P is e4m3_lazy_p_range.
  template <int n, typename Scale, typename Again>
  TANDEM_DEVICE void scale_down(float (&s)[n], Scale scale, Again again) {
    agree_on_largest();
    if (ptx::ballot(largest[0] > largest_kept || largest[1] > largest_kept) != 0) {
      again(s);
      agree_on_largest();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = 0.0F;
#pragma unroll
      for (int j = 0; j < n / 4; ++j)
        most = ptx::fmax(most, ptx::fmax(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      most = largest_of_quad(most);
      // Other rows keep their bits: the factor computed for them need not be exactly 1.
      const bool moves = largest[h] > largest_sum;
      const float up = ptx::log2(most) - below;
      const float down = e4m3_lazy_p_range * ptx::reciprocal(most);
      const float factor = moves ? down : 1.0F;
      reference[h] += moves ? up : 0.0F;
      tile_sum[h] *= factor;
#pragma unroll
      for (int j = 0; j < n / 4; ++j) {
        s[4 * j + 2 * h] *= factor;
        s[4 * j + 2 * h + 1] *= factor;
      }
      scale_row(h, factor, scale);
    }
  }
  TANDEM_DEVICE void add_sums(float v_scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += tile_sum[h];
      weight[h] = v_scale;
    }
  }
  TANDEM_DEVICE void agree_on_largest() {
#pragma unroll
    for (int h = 0; h < 2; ++h) largest[h] = largest_of_quad(largest[h]);
  }
  template <typename Scale>
  TANDEM_DEVICE void move_rows(const bool (&which)[2], const float (&maximum)[2], Scale scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (which[h]) {
        // The reference never moves down, which it would if only a linear exponential was infinite.
        const float moved = ptx::fmax_nan(maximum[h] - below, reference[h]);
        scale_row(h, ptx::exp2(reference[h] - moved), scale);
        reference[h] = moved;
      }
    }
  }
  template <typename Scale>
  TANDEM_DEVICE void scale_row(int h, float factor, Scale scale) {
    sum[h] *= factor;
    weight[h] *= factor;
    scale(h, factor);
  }
};

}  // namespace tandem::tile
