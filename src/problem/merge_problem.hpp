// What merge is about once its arguments have been checked.
#pragma once

#include <vector>

#include "problem/problem.hpp"

namespace tandem {

struct MergePart {
  Operand out;
  Operand lse;  ///< f32, by (batch, row, head)
};

/// Operands as in Problem; packed queries are those of one batch entry.
struct MergeProblem {
  Device device;
  std::int64_t batch = 0;
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  std::vector<MergePart> parts;
  Operand out;
  Operand lse;  ///< may not be given

  /// Rows of all heads.
  [[nodiscard]] std::int64_t count() const { return batch * rows * heads; }
};

}  // namespace tandem
