// Online softmax over the rows that a thread shares with its quad (four lanes hold a row).
#pragma once

#include "ops/forward/config.hpp"
#include "ptx/eight_bit.cuh"
#include "ptx/trace.cuh"
#include "tile/fragment.cuh"

namespace tandem::tile {

constexpr float log2_e = 1.4426950408889634F;
constexpr float ln_2 = 0.6931471805599453F;

/// A row's exponentials, 2^(logit - reference): all of them, or those of a part of the keys.
struct RowSum : PartSum {
  [[nodiscard]] TANDEM_DEVICE bool has_seen_nothing() const {
    return reference == -ptx::infinity() && sum <= 0.0F;
  }
  /// 2^(a - b), 1 where both are -inf.
  static TANDEM_DEVICE float worth(float a, float b) { return a == b ? 1.0F : ptx::exp2(a - b); }

  /// Returns the row's LSE (natural logarithm), and in `factor` the number by which the output must be
  /// multiplied. A sink (logarithm to base 2) joins the sum. A row that has seen no key gets -inf and 0, as
  /// has one with a sink that has seen nothing but -inf. Without a sink that one gets NaN. So does a row
  /// whose reference was rounded by more than its exponentials have room for (logits beyond 2^27), if
  /// `checked`: sums in units of their own do not tell.
  template <bool checked = true>
  TANDEM_DEVICE float finish(bool has_sink, float sink_log2, float& factor) const {
    if (has_seen_nothing()) {
      const bool infinite = sum < 0.0F && !has_sink;
      factor = infinite ? ptx::quiet_nan() : 0.0F;
      return infinite ? ptx::quiet_nan() : -ptx::infinity();
    }
    const float old_shift = reference == -ptx::infinity() ? 0.0F : reference;
    float new_shift = old_shift;
    float worth = 1.0F;
    float total = sum;
    if (has_sink) {
      new_shift = ptx::fmax(old_shift, sink_log2);
      worth = ptx::exp2(old_shift - new_shift);
      total = total * worth + ptx::exp2(sink_log2 - new_shift);
    }
    factor = worth * ptx::reciprocal(total);
    if constexpr (checked) {
      // The largest logit's exponential is 1 but for the reference's rounding. A total of infinity, or of
      // less than 2^-8, whose largest weights may be 0 in 16 bits, makes the factor NaN: infinity * 0. (A
      // comparison takes a register more, which kernels of 8-bit keys do not have: ptxas 13.)
      factor = ptx::fma(total, 0.0F, factor);
      factor = ptx::fma(factor * 0x1p120F, 0.0F, factor);
    }
    return (new_shift + ptx::log2(total)) * ln_2;
  }
};

/// A row whose reference may lag behind the largest logit.
struct RowSumAndMaximum : RowSum {
  float largest;
};

/// The row's largest logit: the reference, where every block moves it to its own.
[[nodiscard]] TANDEM_DEVICE float largest_logit(const RowSum& row) {
  return row.reference;
}
[[nodiscard]] TANDEM_DEVICE float largest_logit(const RowSumAndMaximum& row) {
  return row.largest;
}

/// Two rows a thread (h = 0, 1). Exponentials are 2^(score * scale_log2 - reference). With lazy rescaling the
/// reference is the running maximum of an earlier block, otherwise of this one.
struct OnlineSoftmax {
  float reference[2];  ///< -inf: no key has been seen
  float sum[2];        ///< over this thread's columns; the quad's sums meet in finish. Below 0: set_infinite

  TANDEM_DEVICE OnlineSoftmax() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[h] = -ptx::infinity();
      sum[h] = 0.0F;
    }
  }

  /// What is subtracted in the exponent: 0 where no key has been seen, so that -inf - -inf never arises.
  static TANDEM_DEVICE float shift(float reference) {
    return reference == -ptx::infinity() ? 0.0F : reference;
  }
  /// What exponentials to one reference are multiplied by for another that is not below it.
  static TANDEM_DEVICE float rescaled(float reference, float moved) {
    return ptx::exp2(reference - shift(moved));
  }

  /// From here on the reference's rounding, which every exponent of the row has in it, may exceed 4, and soon
  /// what 2^x has room for in 16 bits, or at all.
  static constexpr float far = 0x1p27F;

  /// What the exponents of both rows subtract; the scores of far rows become relative to their reference, and
  /// the subtrahend 0. The scaled scores are rounded as the reference was, so that the largest exponent is 0;
  /// a logit is not known better. Almost no row is far. All lanes of a warp call. Kernels of many queries do
  /// without: it made them a fifth longer, and slower (records/history/forward.md, Far logits).
  template <int n>
  TANDEM_DEVICE void bring_near(float (&s)[n], float (&subtract)[2], float scale_log2) const {
    subtract[0] = shift(reference[0]);
    subtract[1] = shift(reference[1]);
    const auto is_far = [](float x) { return ptx::abs(x) >= far; };
    if (!ptx::any_lane(is_far(subtract[0]) || is_far(subtract[1]))) return;
    const float inverse = ptx::reciprocal(scale_log2);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float x = subtract[i / 2 % 2];
      if (is_far(x)) s[i] = (ptx::multiply(s[i], scale_log2) - x) * inverse;
    }
#pragma unroll
    for (float& x : subtract) x = is_far(x) ? 0.0F : x;
  }

  /// Raises the references to the scores' maxima. `rescale[h]` is the factor by which the row's earlier sums
  /// and outputs must be multiplied.
  template <int n>
  TANDEM_DEVICE void update(const float (&s)[n], float (&rescale)[2], float scale_log2) {
    // Four chains a row: a dependent instruction waits eight cycles, an independent one two.
    float a[2][4];
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float score = s[4 * j + 2 * h + e];
          float& chain = a[h][j % 2 * 2 + e];
          chain = j < 2 ? score : ptx::fmax(chain, score);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float m = largest_of_quad(ptx::fmax(ptx::fmax(a[h][0], a[h][1]), ptx::fmax(a[h][2], a[h][3])));
      const float moved = ptx::fmax(reference[h], m * scale_log2);
      rescale[h] = rescaled(reference[h], moved);
      reference[h] = moved;
    }
  }

  /// Turns the scores into exponentials in place, a quarter at a time; `total` are their sums. `beside(i)` is
  /// called behind quarter i, for what may run among the exponentials of the next.
  ///
  /// The special function unit takes an exponential of a warp every eight cycles. Other instructions fit
  /// between: the arguments of the next quarter, the sums of the one before, and `beside`. ptxas interleaves
  /// them if the source has them in this order; written one loop after the other, they stay in sequence.
  template <int n, typename Beside>
  TANDEM_DEVICE void exponentials(float (&s)[n], float (&total)[2], float scale_log2, Beside beside) const {
    const float subtract[2] = {shift(reference[0]), shift(reference[1])};
    exponentials(s, total, subtract, scale_log2, beside);
  }
  /// Computes the exponentials of scores that `bring_near` has seen.
  template <int n, typename Beside>
  static TANDEM_DEVICE void exponentials(float (&s)[n], float (&total)[2], const float (&subtract)[2],
                                         float scale_log2, Beside beside) {
    static_assert(n % 8 == 0);
    ptx::trace(TraceEvent::exponentials);
    constexpr int size = n / 4;
    float chain[4] = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
    for (int i = 0; i < size; ++i) s[i] = ptx::fma(s[i], scale_log2, -subtract[i / 2 % 2]);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
      for (int j = 0; j < size; ++j) {
        const int i = quarter * size + j;
        s[i] = ptx::exp2(s[i]);
        if (quarter < 3) s[i + size] = ptx::fma(s[i + size], scale_log2, -subtract[(i + size) / 2 % 2]);
        if (quarter > 0) chain[(i - size) / 2 % 2 + 2 * (i % 2)] += s[i - size];
      }
      beside(quarter);
    }
#pragma unroll
    for (int i = 3 * size; i < n; ++i) chain[i / 2 % 2 + 2 * (i % 2)] += s[i];
    total[0] = chain[0] + chain[2];
    total[1] = chain[1] + chain[3];
  }

  /// Adds a block's sums.
  TANDEM_DEVICE void add(const float (&total)[2], const float (&rescale)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = ptx::fma(sum[h], rescale[h], total[h]);
  }
  /// Adds them where the references stayed.
  TANDEM_DEVICE void add(const float (&total)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += total[h];
  }

  /// One block: raises the references as `update` does, turns the scores into exponentials, and adds these.
  /// `near`: the scores of far rows are brought near.
  template <bool near = false, int n>
  TANDEM_DEVICE void add_block(float (&s)[n], float (&rescale)[2], float scale_log2) {
    float total[2];
    update(s, rescale, scale_log2);
    float subtract[2] = {shift(reference[0]), shift(reference[1])};
    if constexpr (near) bring_near(s, subtract, scale_log2);
    exponentials(s, total, subtract, scale_log2, [](int) {});
    add(total, rescale);
  }

  /// Lazy rescaling: whether a block's exponentials, relative to the reference of the blocks before it, are
  /// too large to be kept. Their sums tell, since all of them are positive. Up to the limit P is finite in
  /// f16, and the rounding of earlier, relatively small exponentials is of the size of this block's own. A
  /// NaN counts as too large, since a sum of infinities may be NaN.
  TANDEM_DEVICE bool outgrown(const float (&total)[2]) const {
    constexpr float limit = 64.0F;
    return !(total[0] <= limit) || !(total[1] <= limit) || has_unseeing();
  }
  /// Whether one of the rows has seen no key.
  [[nodiscard]] TANDEM_DEVICE bool has_unseeing() const {
    return reference[0] == -ptx::infinity() || reference[1] == -ptx::infinity();
  }

  /// Moves the references up to the largest of such exponentials, and makes the exponentials and their sums
  /// relative to them; `rescale` is as in `update`. False if exponentials have overflowed or vanished: then
  /// nothing is changed. All lanes of a warp call.
  template <int n>
  TANDEM_DEVICE bool move(float (&s)[n], float (&total)[2], float (&rescale)[2]) {
    constexpr float largest_kept = 0x1p100F;
    constexpr float smallest_kept = 0x1p-60F;
    float moved[2];
    bool usable = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = 0.0F;
#pragma unroll
      for (int i = 0; i < n / 2; ++i) largest = ptx::fmax(largest, s[i / 2 * 4 + 2 * h + i % 2]);
      largest = largest_of_quad(largest);
      const bool first = reference[h] == -ptx::infinity();
      if (largest > largest_kept || (first && largest < smallest_kept)) usable = false;
      moved[h] = first || largest > 1.0F ? shift(reference[h]) + ptx::log2(largest) : reference[h];
    }
    if (ptx::ballot(!usable) != 0) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rescale[h] = ptx::exp2(shift(reference[h]) - moved[h]);
      reference[h] = moved[h];
      total[h] *= rescale[h];
    }
#pragma unroll
    for (int i = 0; i < n; ++i) s[i] *= rescale[i / 2 % 2];
    add(total, rescale);
    return true;
  }

  /// Says of a row whose scores were all -inf that its query sees a key.
  TANDEM_DEVICE void set_infinite(int h) {
    if (reference[h] == -ptx::infinity() && sum[h] == 0.0F) sum[h] = -1.0F;
  }
};

/// Rows whose reference may lag behind the largest logit.
struct SoftmaxWithMaxima : OnlineSoftmax {
  float largest[2];  ///< logarithm to base 2
};

/// What the quad has of a row.
[[nodiscard]] TANDEM_DEVICE RowSum sum_of_row(const OnlineSoftmax& softmax, int h) {
  return {{softmax.reference[h], sum_of_quad(softmax.sum[h])}};
}
[[nodiscard]] TANDEM_DEVICE RowSumAndMaximum sum_of_row(const SoftmaxWithMaxima& softmax, int h) {
  return {{{softmax.reference[h], sum_of_quad(softmax.sum[h])}}, softmax.largest[h]};
}

}  // namespace tandem::tile
