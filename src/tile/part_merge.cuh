// Merges the splits of a row, each with its O and the sum of its exponentials. The forward kernel does it
// where a CTA computes several splits of a tile, the kernel `combine` where many share them: by the same
// operations in the same order, so that bits do not tell which.
//
// The order follows from the splits' numbers in the sequence alone. Those of a group, whose numbers differ in
// their last digit to the base merged_group, are merged one behind the other, from the last keys to the
// first; so are the groups whose numbers differ in the last digit but one, and so on. What a row does not see
// is merged without changing a bit, and so is a group of one.
#pragma once

#include "ptx/memory.cuh"
#include "tile/softmax.cuh"

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

  /// Takes a split, or what has been merged of some. A NaN is kept in the sum.
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
  /// Adds numbers of which the first two have weights of their own.
  static TANDEM_DEVICE ptx::Float4 add(const ptx::Float4& before, const ptx::Float4& part,
                                       const Weights& first, const Weights& last) {
    return {add(before.x, part.x, first), add(before.y, part.y, first), add(before.z, part.z, last),
            add(before.w, part.w, last)};
  }
};

/// What a partial result says of a row.
TANDEM_DEVICE PartMerge load_sum(const PartSum* at) {
  const ptx::Float2 sum = ptx::load_global(reinterpret_cast<const ptx::Float2*>(at));
  return {sum.x, sum.y};
}

/// A split among those that one CTA merges, or a group of splits among those of its level: their numbers.
struct MergePlace {
  int number = 0;
  int first = 0;  ///< [first, last]: all that are merged, from the last to the first
  int last = 0;

  /// Whether it is the first of its group that is merged, and the last.
  TANDEM_DEVICE bool opens() const { return number == last || digit(number) == merged_group - 1; }
  TANDEM_DEVICE bool closes() const { return number == first || digit(number) == 0; }
  /// Its group.
  TANDEM_DEVICE MergePlace group() const {
    return {number / merged_group, first / merged_group, last / merged_group};
  }

 private:
  static TANDEM_DEVICE int digit(int n) { return n % merged_group; }
};

}  // namespace tandem::tile
