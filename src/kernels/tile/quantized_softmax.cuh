// Online softmax where P is rounded to 8 bits and each tile's product is promoted into f32 sums.
#pragma once

#include "kernels/quantized_config.hpp"
#include "kernels/tile/softmax.cuh"

namespace tandem::tile {

/// 2^x on the FMA pipe, relative error 8e-5: x less the nearest whole number by a cubic, the exponent by an
/// addition of bits. For x up to 100; below -126 the result is 2^-126, and of NaN it is anything.
TANDEM_DEVICE float exp2_cubic(float x) {
  constexpr float magic = 12582912.0F;  // 1.5 * 2^23: a sum has the whole number in its low bits
  const float clamped = ptx::fmax(x, -126.0F);
  const float whole = clamped + magic;
  const float r = clamped - (whole - magic);
  float p = ptx::fma(r, 0.05517155F, 0.24261136F);
  p = ptx::fma(p, r, 0.69326102F);
  p = ptx::fma(p, r, 0.99992806F);
  return ptx::add_exponent(p, whole);
}

/// Two rows a thread (h = 0, 1); everything in units of the logarithm to base 2. O and the sums are kept in
/// units of 2^reference, which stays where it is until a maximum is so far above that f32 might overflow: a
/// new maximum then costs one multiplication a row instead of one an output.
template <QuantizedConfig C>
struct QuantizedSoftmax {
  /// By how much a maximum may exceed the reference.
  static constexpr float headroom = 40.0F;
  /// Where V's scales by row join P, P is rounded in units of its largest in the tile; else of 2^maximum.
  static constexpr bool by_tile = C.v_row_scales;
  static constexpr float range = C.pv == Codes::input  ? 1.0F
                                 : C.pv == Codes::e4m3 ? e4m3_p_range
                                                       : u8_p_range;
  /// P's range as a summand of the exponent.
  static constexpr float offset = !by_tile && C.pv == Codes::e4m3 ? 8.0F : 0.0F;
  static_assert(e4m3_p_range == 256.0F);

  float maximum[2];  ///< of all tiles so far; by_tile: of this one
  float reference[2];
  float sum[2];  ///< of this thread's columns
  float tile_sum[2];
  float tile_unit[2];  ///< by_tile: the largest P in the tile
  float weight[2];     ///< what the products of the tile whose P is in registers are worth

  static TANDEM_DEVICE float finite(float maximum) { return maximum == -ptx::infinity() ? 0.0F : maximum; }

  TANDEM_DEVICE void reset() {
#pragma unroll
    for (int h = 0; h < 2; ++h) maximum[h] = reference[h] = -ptx::infinity();
  }

  /// Takes the scores, times their unit, into the maxima. A NaN stays: all of its row is NaN then, whichever
  /// of its exponentials a polynomial computes.
  template <int n, int units>
  TANDEM_DEVICE void update_maximum(const float (&s)[n], const float (&unit)[units]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Four chains each: a link takes eight cycles, an instruction two.
      float a[4] = {s[2 * h], s[2 * h + 1], s[4 + 2 * h], s[4 + 2 * h + 1]};
#pragma unroll
      for (int j = 2; j < n / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          a[j % 2 * 2 + e] = ptx::fmax_nan(a[j % 2 * 2 + e], s[4 * j + 2 * h + e]);
        }
      }
      float m = ptx::fmax_nan(ptx::fmax_nan(a[0], a[1]), ptx::fmax_nan(a[2], a[3]));
      m = ptx::fmax_nan(m, ptx::shuffle_xor(m, 1));
      m = ptx::fmax_nan(m, ptx::shuffle_xor(m, 2)) * unit[h % units];
      maximum[h] = by_tile ? m : ptx::fmax_nan(maximum[h], m);
    }
  }

  /// Turns the scores into exponentials in place, a quarter at a time, and sums them; `beside(i)` is called
  /// among quarter i's instructions. `masked`: some scores may be -inf, which the polynomial would not turn
  /// into 0.
  ///
  /// The exponential unit takes a warp's instruction every eight cycles; what else a tile needs fits between:
  /// arguments of the next quarter, sums of the one before, and `beside`. The assembler mixes them so, if it
  /// is given them in this order.
  template <int n, int units, typename Beside>
  TANDEM_DEVICE void exponentials(float (&s)[n], const float (&unit)[units], bool masked, Beside beside) {
    constexpr int size = n / 4;
    const float subtract[2] = {finite(maximum[0]) - offset, finite(maximum[1]) - offset};
    const auto argument = [&](int i) {
      s[i] = ptx::fma(s[i], unit[i / 2 % 2 % units], -subtract[i / 2 % 2]);
    };
    float total[4] = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
    for (int i = 0; i < size; ++i) argument(i);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
      for (int j = 0; j < size; ++j) {
        const int i = quarter * size + j;
        s[i] = !masked && i % 8 < C.polynomials ? exp2_cubic(s[i]) : ptx::exp2(s[i]);
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

  /// by_tile: multiplies P by V's scales, and brings the largest to P's range; for u8 the codes are then in
  /// the lowest bytes.
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
      largest[h] = ptx::fmax_nan(largest[h], ptx::shuffle_xor(largest[h], 1));
      largest[h] = ptx::fmax_nan(largest[h], ptx::shuffle_xor(largest[h], 2));
      tile_unit[h] = largest[h];
      const float inverse = largest[h] > 0.0F ? range * ptx::reciprocal(largest[h]) : 0.0F;
#pragma unroll
      for (int j = 0; j < n / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * h + e];
          x = C.pv == Codes::s8 ? ptx::round_to_byte(x, inverse) : x * inverse;
        }
      }
    }
  }

  /// The first tile of a row: its maximum is the reference.
  TANDEM_DEVICE void settle_first(float v_scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[h] = maximum[h];
      sum[h] = 0.0F;
    }
    weigh(v_scale);
  }

  /// Takes the tile's sum in and finds its weight; `o`, in which all earlier tiles are, changes its units if
  /// it has to.
  template <int n>
  TANDEM_DEVICE void settle(float v_scale, float (&o)[n]) {
    if constexpr (C.pv == Codes::input) {
      rescale(o);
      return;
    }
    const bool above[2] = {maximum[0] - reference[0] > headroom, maximum[1] - reference[1] > headroom};
    if (ptx::ballot(above[0] || above[1]) != 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = above[h] ? ptx::exp2(reference[h] - maximum[h]) : 1.0F;
        if (above[h]) reference[h] = maximum[h];
        sum[h] *= factor;
#pragma unroll
        for (int j = 0; j < n / 4; ++j) {
          o[4 * j + 2 * h] *= factor;
          o[4 * j + 2 * h + 1] *= factor;
        }
      }
    }
    weigh(v_scale);
  }

  /// Where O stays in the tensor cores' f32 accumulators: it and the sum change to units of the new maximum.
  template <int n>
  TANDEM_DEVICE void rescale(float (&o)[n]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float factor = ptx::exp2(reference[h] - finite(maximum[h]));
      reference[h] = maximum[h];
      sum[h] = sum[h] * factor + tile_sum[h];
#pragma unroll
      for (int j = 0; j < n / 4; ++j) {
        o[4 * j + 2 * h] *= factor;
        o[4 * j + 2 * h + 1] *= factor;
      }
    }
  }

  TANDEM_DEVICE void weigh(float v_scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float worth = ptx::exp2(finite(maximum[h]) - finite(reference[h]));
      // A tile of which the row sees nothing has no maximum.
      if (by_tile && maximum[h] == -ptx::infinity()) worth = 0.0F;
      sum[h] = ptx::fma(tile_sum[h], offset != 0.0F ? worth * (1.0F / range) : worth, sum[h]);
      weight[h] = worth * (1.0F / range) * (by_tile ? tile_unit[h] : v_scale);
    }
  }
};

}  // namespace tandem::tile
