// What quantize is about once its arguments have been checked.
#pragma once

#include "problem/problem.hpp"
#include "problem/recipe.hpp"

namespace tandem {

/// Operands as in Problem; scales by (batch, block or row, head), mean by (batch, -, head) with contiguous
/// channels.
struct QuantizeProblem {
  Device device;
  std::int64_t batch = 0;
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  Operand x, codes, scales, mean;
  bool sampled_mean = false;  ///< the mean samples rows, where there are more than mean_all_keys
  ScaleGroup group = ScaleGroup::head;
  bool rotate = false;
  /// s8, scales by block: rows with a NaN or an infinity get a nan_marker, as attention expects. Otherwise
  /// the scale of their group is NaN.
  bool nan_markers = false;
};

}  // namespace tandem
