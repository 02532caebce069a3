// Online softmax over the rows that a thread shares with its quad (four lanes hold a row).
#pragma once

#include "kernels/tile/fragment.cuh"

namespace tandem::tile {

constexpr float log2_e = 1.4426950408889634F;
constexpr float ln_2 = 0.6931471805599453F;

/// Two rows a thread (h = 0, 1). `maximum` is of the raw scores; exponentials are 2^(score * scale_log2 -
/// shift).
struct OnlineSoftmax {
  float maximum[2];
  float sum[2];  ///< of this thread's columns; the quad's sums meet in finish

  TANDEM_DEVICE OnlineSoftmax() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      maximum[h] = -ptx::infinity();
      sum[h] = 0.0F;
    }
  }

  /// What is subtracted in the exponent: 0 where no key has been seen, so that -inf - -inf never arises.
  static TANDEM_DEVICE float shift(float maximum, float scale_log2) {
    return maximum == -ptx::infinity() ? 0.0F : maximum * scale_log2;
  }

  /// Takes the scores into the maxima. `rescale[h]` is what earlier sums and outputs of the row are worth
  /// now.
  template <int n>
  TANDEM_DEVICE void update_maximum(const float (&s)[n], float (&rescale)[2], float scale_log2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Four chains each: a link takes eight cycles, an instruction two.
      float a[4] = {ptx::fmax(maximum[h], s[2 * h]), s[2 * h + 1], s[4 + 2 * h], s[4 + 2 * h + 1]};
#pragma unroll
      for (int j = 2; j < n / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) a[j % 2 * 2 + e] = ptx::fmax(a[j % 2 * 2 + e], s[4 * j + 2 * h + e]);
      }
      float m = ptx::fmax(ptx::fmax(a[0], a[1]), ptx::fmax(a[2], a[3]));
      m = ptx::fmax(m, ptx::shuffle_xor(m, 1));
      m = ptx::fmax(m, ptx::shuffle_xor(m, 2));
      rescale[h] = ptx::exp2(maximum[h] * scale_log2 - shift(m, scale_log2));
      maximum[h] = m;
    }
  }

  /// Turns the scores into exponentials in place, a quarter at a time, and adds them to the sums.
  /// `before(i)` is called before quarter i's instructions, and with 4 after the last; `beside(i)` among
  /// those of quarters from `early` on.
  ///
  /// The exponential unit takes a warp's instruction every eight cycles; what else a block needs fits
  /// between: arguments of the next quarter, sums of the one before, and `beside`. The assembler mixes them
  /// so, if it is given them in this order; written one after the other, they stay one after the other.
  template <int early, int n, typename Before, typename Beside>
  TANDEM_DEVICE void exponentials(float (&s)[n], const float (&rescale)[2], float scale_log2, Before before,
                                  Beside beside) {
    static_assert(n % 8 == 0);
    constexpr int size = n / 4;
    const float subtract[2] = {shift(maximum[0], scale_log2), shift(maximum[1], scale_log2)};
    float total[4] = {sum[0] * rescale[0], sum[1] * rescale[1], 0.0F, 0.0F};
#pragma unroll
    for (int i = 0; i < size; ++i) s[i] = ptx::fma(s[i], scale_log2, -subtract[i / 2 % 2]);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      before(quarter);
#pragma unroll
      for (int j = 0; j < size; ++j) {
        const int i = quarter * size + j;
        s[i] = ptx::exp2(s[i]);
        if (quarter < 3) s[i + size] = ptx::fma(s[i + size], scale_log2, -subtract[(i + size) / 2 % 2]);
        if (quarter > 0) total[(i - size) / 2 % 2 + 2 * (i % 2)] += s[i - size];
      }
      if (quarter < early) continue;
      beside(quarter);
    }
    before(4);
#pragma unroll
    for (int i = 3 * size; i < n; ++i) total[i / 2 % 2 + 2 * (i % 2)] += s[i];
    sum[0] = total[0] + total[2];
    sum[1] = total[1] + total[3];
  }

  /// The row's LSE (natural logarithm), and in `factor` what the output must be multiplied with. A sink (in
  /// units of the logarithm to base 2) joins the sum; a row that has seen no key gets 0 and -inf.
  TANDEM_DEVICE float finish(int h, float scale_log2, bool has_sink, float sink_log2, float& factor) const {
    float total = sum[h];
    total += ptx::shuffle_xor(total, 1);
    total += ptx::shuffle_xor(total, 2);
    if (maximum[h] == -ptx::infinity() && total == 0.0F) {
      factor = 0.0F;
      return -ptx::infinity();
    }
    const float old_shift = shift(maximum[h], scale_log2);
    float new_shift = old_shift;
    float worth = 1.0F;
    if (has_sink) {
      new_shift = ptx::fmax(old_shift, sink_log2);
      worth = ptx::exp2(old_shift - new_shift);
      total = total * worth + ptx::exp2(sink_log2 - new_shift);
    }
    factor = worth * ptx::reciprocal(total);
    return (new_shift + ptx::log2(total)) * ln_2;
  }
};

}  // namespace tandem::tile
