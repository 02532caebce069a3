// Merges the parts of a row, each with its LSE and its O divided by its own sum, one behind the other. The
// forward kernel does it where a CTA computes all splits of a tile, the kernel `combine` where many share
// them: by the same operations in the same order, from the last keys to the first, so that bits do not tell
// which.
#pragma once

#include "kernels/ptx/math.cuh"
#include "kernels/tile/softmax.cuh"

namespace tandem::tile {

/// What has been merged of a row: O is in units of e^maximum / total.
struct PartMerge {
  float maximum = -ptx::infinity();  ///< of the LSEs
  float total = 0.0F;                ///< of e^(LSE - maximum)

  /// What O so far and that of a part are multiplied by.
  struct Weights {
    float before;
    float part;
  };

  /// e^(a - base).
  static TANDEM_DEVICE float weight(float a, float base) { return ptx::exp2((a - base) * log2_e); }
  /// 0 where nothing has been seen, so that -inf - -inf never arises.
  static TANDEM_DEVICE float base_of(float top) { return top == -ptx::infinity() ? 0.0F : top; }

  /// Takes a part. A NaN is lost as a maximum, and kept in the total.
  TANDEM_DEVICE Weights take(float lse) {
    const float top = ptx::fmax(maximum, lse);
    const Weights w{weight(maximum, base_of(top)), weight(lse, base_of(top))};
    total = ptx::fma(total, w.before, w.part);
    maximum = top;
    return w;
  }
  static TANDEM_DEVICE float add(float before, float part, const Weights& w) {
    return ptx::fma(before, w.before, part * w.part);
  }

  /// Returns the row's LSE, and in `factor` the number by which O must be multiplied. A sink joins the sum. A
  /// row that has seen no key gets -inf and 0.
  TANDEM_DEVICE float finish(bool has_sink, float sink, float& factor) const {
    if (maximum == -ptx::infinity() && total == 0.0F) {
      factor = 0.0F;
      return -ptx::infinity();
    }
    float sum = total;
    float top = base_of(maximum);
    float worth = 1.0F;
    if (has_sink) {
      top = ptx::fmax(top, sink);
      worth = weight(base_of(maximum), top);
      sum = ptx::fma(total, worth, weight(sink, top));
    }
    factor = worth * ptx::reciprocal(sum);
    return ptx::fma(ptx::log2(sum), ln_2, top);
  }
};

}  // namespace tandem::tile
