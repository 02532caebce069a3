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
      // Two chains each, since one of n / 2 dependent maxima would take four cycles a link.
      float a = ptx::fmax(maximum[h], s[2 * h]);
      float b = s[2 * h + 1];
#pragma unroll
      for (int j = 1; j < n / 4; ++j) {
        a = ptx::fmax(a, s[4 * j + 2 * h]);
        b = ptx::fmax(b, s[4 * j + 2 * h + 1]);
      }
      float m = ptx::fmax(a, b);
      m = ptx::fmax(m, ptx::shuffle_xor(m, 1));
      m = ptx::fmax(m, ptx::shuffle_xor(m, 2));
      rescale[h] = ptx::exp2(maximum[h] * scale_log2 - shift(m, scale_log2));
      maximum[h] = m;
    }
  }

  /// Turns the scores into exponentials in place and adds them to the sums.
  template <int n>
  TANDEM_DEVICE void exponentials(float (&s)[n], const float (&rescale)[2], float scale_log2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float subtract = shift(maximum[h], scale_log2);
      float total_a = 0.0F;
      float total_b = 0.0F;
#pragma unroll
      for (int j = 0; j < n / 4; ++j) {
        float& x = s[4 * j + 2 * h];
        float& y = s[4 * j + 2 * h + 1];
        x = ptx::exp2(ptx::fma(x, scale_log2, -subtract));
        y = ptx::exp2(ptx::fma(y, scale_log2, -subtract));
        total_a += x;
        total_b += y;
      }
      sum[h] = sum[h] * rescale[h] + (total_a + total_b);
    }
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
    factor = worth / total;
    return (new_shift + ptx::log2(total)) * ln_2;
  }
};

}  // namespace tandem::tile
