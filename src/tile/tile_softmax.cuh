// Online softmax by tile: P is rounded in units of its largest value in the row and tile.
#pragma once

#include "ops/eight_bit/config.hpp"
#include "ptx/eight_bit.cuh"
#include "ptx/memory.cuh"
#include "tile/lazy_softmax.cuh"

namespace tandem::tile {

/// Two rows a thread (h = 0, 1); all logarithms are to base 2. O and the sums are kept in units of
/// 2^reference. The reference stays until a maximum exceeds it so far that f32 might overflow. A new maximum
/// then usually costs one multiplication a row (the tile's weight) instead of one for each output.
///
/// `zero_point`: V is stored as u8 with zero point 128, so that sums of P V lie in [0, 2^23). The bits of
/// such an integer, read as f32, are exactly the integer times 2^-149, a subnormal number: the multiply-add
/// that promotes a sum needs no conversion. O is in units of 2^-45 times `v_reference`, a power of two near
/// V's largest scale, so that the weights are far from f32's limits. Each output of a row exceeds its value
/// by 128 * (sum of the row's quantized P) * weight; this excess is subtracted from time to time.
template <EightBitConfig C>
struct TileSoftmax {
  static constexpr bool zero_point = C.v_has_zero_point();
  /// The amount by which a maximum may exceed the reference.
  static constexpr float headroom = zero_point ? 16.0F : 40.0F;
  static constexpr float subnormal_weight = 0x1p104F;
  static constexpr float from_subnormal = 0x1p45F;  ///< 149 - 104
  /// The factor by which a scale of V may exceed v_reference.
  static constexpr float growth = 0x1p10F;
  static constexpr bool joins = C.v_row_scales;  ///< V's scales multiply P
  static constexpr float range = C.pv == OperandType::e4m3 ? e4m3_p_range : u8_p_range;
  /// P's range as a summand of the exponent.
  static constexpr float offset = joins ? 0.0F : 7.994353437F;
  static_assert(u8_p_range == 255.0F && (joins || C.pv == OperandType::s8));

  float maximum[2];  ///< the tile's
  float reference[2];
  float sum[2];  ///< over this thread's columns
  float tile_sum[2];
  float tile_maximum[2];  ///< joins: the largest P in the tile
  float weight[2];        ///< multiplies the products of the tile whose P is in registers
  // zero_point:
  float per_v_reference;   ///< 1 / v_reference
  float excess[2];         ///< the excess of O, and of the products to come: this thread's columns' part
  float largest_logit[2];  ///< the largest of all tiles' maxima, which the reference lags behind; with
                           ///< max_logits

  static TANDEM_DEVICE float finite(float maximum) { return maximum == -ptx::infinity() ? 0.0F : maximum; }

  TANDEM_DEVICE void reset() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[h] = -ptx::infinity();
      sum[h] = weight[h] = 0.0F;
      if constexpr (C.tiling.max_logits) largest_logit[h] = -ptx::infinity();
    }
  }

  [[nodiscard]] TANDEM_DEVICE bool has_seen_none(int h) const {
    return reference[h] == -ptx::infinity();
  }

  template <int n, int factors>
  TANDEM_DEVICE void find_maximum(const float (&s)[n], const float (&factor)[factors]) {
    LazySoftmax<false>::find_maximum(maximum, s, factor);
    keep_largest();
  }
  /// The maximum of integer scores: one instruction compares two of them.
  template <int n, int factors>
  TANDEM_DEVICE void find_maximum(const i32 (&s)[n], const float (&factor)[factors]) {
    i32 m[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      i32 a[2] = {max(s[2 * h], s[2 * h + 1]), max(s[4 + 2 * h], s[4 + 2 * h + 1])};
#pragma unroll
      for (int j = 2; j < n / 4; ++j) {
        a[j % 2] = max(max(a[j % 2], s[4 * j + 2 * h]), s[4 * j + 2 * h + 1]);
      }
      m[h] = max(a[0], a[1]);
    }
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        m[h] = max(m[h], static_cast<i32>(ptx::shuffle_xor(static_cast<u32>(m[h]), distance)));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) maximum[h] = ptx::to_float(m[h]) * factor[h % factors];
    keep_largest();
  }

  /// Turns the scores, which `raw` has, into exponentials, a quarter at a time, and sums them; `beside(i)` is
  /// called behind quarter i. As in LazySoftmax, what else a tile needs goes between exponentials.
  template <int n, int factors, typename Raw, typename Beside>
  TANDEM_DEVICE void exponentials(float (&s)[n], const float (&factor)[factors], Raw raw, Beside beside) {
    constexpr int size = n / 4;
    const float subtract[2] = {finite(maximum[0]) - offset, finite(maximum[1]) - offset};
    const auto argument = [&](int i) {
      s[i] = ptx::fma(raw(i), factor[i / 2 % 2 % factors], -subtract[i / 2 % 2]);
    };
    float total[4] = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
    for (int i = 0; i < size; ++i) argument(i);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
      for (int j = 0; j < size; ++j) {
        const int i = quarter * size + j;
        s[i] = ptx::exp2(s[i]);
        if (quarter < 3) argument(i + size);
        if (quarter > 0) total[i / 2 % 2 + 2 * (i % 2)] += s[i - size];
      }
      beside(quarter);
    }
#pragma unroll
    for (int i = 3 * size; i < n; ++i) total[i / 2 % 2 + 2 * (i % 2)] += s[i];
    tile_sum[0] = total[0] + total[2];
    tile_sum[1] = total[1] + total[3];
  }

  /// Multiplies P by V's scales, and scales each row so that its largest value fills P's range. For u8 the
  /// rounded values are then in the lowest bytes of the floats.
  template <int n>
  TANDEM_DEVICE void join_scales(float (&s)[n], const float* v_scales) {
    float largest[2] = {0.0F, 0.0F};
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
      const ptx::Float2 v = ptx::load_shared(reinterpret_cast<const ptx::Float2*>(v_scales + 8 * j));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        s[4 * j + 2 * h] *= v.x;
        s[4 * j + 2 * h + 1] *= v.y;
        largest[h] = ptx::fmax_nan(largest[h], ptx::fmax_nan(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = tile_maximum[h] = largest_of_quad_nan(largest[h]);
      const float inverse = largest[h] > 0.0F ? range * ptx::reciprocal(largest[h]) : 0.0F;
#pragma unroll
      for (int j = 0; j < n / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * h + e];
          x = C.pv == OperandType::s8 ? ptx::round_to_byte(x, inverse) : x * inverse;
        }
      }
    }
  }

  /// Adds the tile's sum and finds its weight. If necessary it changes the units of `o`, which holds all
  /// earlier tiles. `due`: the excess is subtracted now.
  template <int n, int words>
  TANDEM_DEVICE void add_tile(float v_scale, const u32 (&quantized)[words], bool due, float (&o)[n]) {
    const bool above[2] = {maximum[0] - reference[0] > headroom, maximum[1] - reference[1] > headroom};
    bool changes = C.adds_late() || zero_point ? ptx::any_lane(above[0] || above[1])
                                               : ptx::ballot(above[0] || above[1]) != 0;
    if constexpr (zero_point) changes = changes || due || v_scale * per_v_reference > growth;
    if (changes) {
      const float change = zero_point ? follow(v_scale) : 1.0F;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = above[h] ? ptx::exp2(reference[h] - maximum[h]) : 1.0F;
        if (above[h]) reference[h] = maximum[h];
        sum[h] *= factor;
        scale_row(h, factor * change, o);
      }
    }
    weigh(v_scale, quantized);
  }
  /// The first tile of a row: its maximum becomes the reference. If C.adds_late(), add_tile is called later.
  /// (With a zero point start calls the whole of add_tile, for which ptxas finds registers: with weigh alone
  /// head dimension 256 spills 132 bytes, 300 if causal; with add_tile none, and 16.)
  template <int n, int words>
  TANDEM_DEVICE void start(float v_scale, const u32 (&quantized)[words], float (&o)[n]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) reference[h] = maximum[h];
    if constexpr (zero_point) {
      per_v_reference = inverse_power(v_scale);
      excess[0] = excess[1] = 0.0F;
      add_tile(v_scale, quantized, false, o);
    } else if constexpr (!C.adds_late()) {
      weigh(v_scale, quantized);
    }
  }
  /// Zero point: brings O, which holds all tiles, into the units of the sums, and O, the sums and the
  /// reference into those of v_reference.
  template <int n>
  TANDEM_DEVICE void finish(float (&o)[n]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scale_row(h, from_subnormal, o);
      sum[h] *= per_v_reference;
      reference[h] -= ptx::log2(per_v_reference);
    }
  }

 private:
  TANDEM_DEVICE void keep_largest() {
    if constexpr (C.tiling.max_logits) {
#pragma unroll
      for (int h = 0; h < 2; ++h) largest_logit[h] = ptx::fmax(largest_logit[h], maximum[h]);
    }
  }
  /// 1 / x for a power of two from 2^-126 to 2^126.
  static TANDEM_DEVICE float reciprocal_of_power(float x) {
    return ptx::float_of(0x7F000000U - ptx::bits_of(x));
  }
  /// 1 / (the power of two that is at most `scale`); from 2^-126 to 2^64, so that a sum times it is a number.
  static TANDEM_DEVICE float inverse_power(float scale) {
    constexpr float tiny = 0x1p-64F;
    constexpr float huge = 0x1p126F;
    const float bounded = scale > tiny ? (scale < huge ? scale : huge) : tiny;
    return reciprocal_of_power(ptx::float_of(ptx::bits_of(bounded) & 0x7F800000U));
  }
  /// If V's scale exceeds v_reference too far, v_reference moves to it. Returns the factor by which O must be
  /// multiplied.
  TANDEM_DEVICE float follow(float v_scale) {
    if (!(v_scale * per_v_reference > growth)) return 1.0F;
    const float before = reciprocal_of_power(per_v_reference);
    per_v_reference = inverse_power(v_scale);
    return per_v_reference * before;
  }
  /// Multiplies row h of O by `factor`, and subtracts its excess.
  template <int n>
  TANDEM_DEVICE void scale_row(int h, float factor, float (&o)[n]) {
    float surplus = 0.0F;
    if constexpr (zero_point) {
      surplus = sum_of_quad(excess[h]) * factor;
      excess[h] = 0.0F;
    }
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = o[4 * j + 2 * h + e];
        x = zero_point ? ptx::fma(x, factor, -surplus) : x * factor;
      }
    }
  }
  template <int words>
  TANDEM_DEVICE void weigh(float v_scale, const u32 (&quantized)[words]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // A row that sees no key of the tile has no maximum.
      const float worth =
          maximum[h] == -ptx::infinity() ? 0.0F : ptx::exp2(maximum[h] - finite(reference[h]));
      sum[h] = ptx::fma(tile_sum[h], joins ? worth : worth * (1.0F / range), sum[h]);
      if constexpr (zero_point) {
        weight[h] = worth * (subnormal_weight / range) * (v_scale * per_v_reference);
        u32 zero_point_sum = 0;
#pragma unroll
        for (int i = h; i < words; i += 2) zero_point_sum = ptx::add_128_times(zero_point_sum, quantized[i]);
        excess[h] = ptx::fma(ptx::float_of(zero_point_sum), weight[h], excess[h]);
      } else {
        weight[h] = worth * (1.0F / range) * (joins ? tile_maximum[h] : v_scale);
      }
    }
  }
};

}  // namespace tandem::tile
