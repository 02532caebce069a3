// Merges the parts of a row, each with its O and the sum of its exponentials, one behind the other. The
// forward kernel does it where a CTA computes all splits of a tile, the kernel `combine` where many share
// them: by the same operations in the same order, from the last keys to the first, so that bits do not tell
// which.
#pragma once

#include "kernels/tile/softmax.cuh"

namespace tandem::tile {

/// What has been merged of a row. O is divided by the sum at the end.
struct PartMerge : RowSum {
  TANDEM_DEVICE PartMerge() : RowSum{{-ptx::infinity(), 0.0F}} {}
  TANDEM_DEVICE PartMerge(float reference_, float sum_) : RowSum{{reference_, sum_}} {}

  /// What O so far and that of a part are multiplied by.
  struct Weights {
    float before;
    float part;
  };

  /// Takes a part. A NaN is kept in the sum.
  TANDEM_DEVICE Weights take(const PartSum& part) {
    const float top = ptx::fmax(reference, part.reference);
    const Weights w{worth(reference, top), worth(part.reference, top)};
    sum = ptx::fma(sum, w.before, part.sum * w.part);
    reference = top;
    return w;
  }
  static TANDEM_DEVICE float add(float before, float part, const Weights& w) {
    return ptx::fma(before, w.before, part * w.part);
  }
};

}  // namespace tandem::tile
