// Rows that are added to others, as gradients of parts are.
#pragma once

#include "problem/problem.hpp"

namespace tandem::cpu {

/// Rows of an operand: heads times `columns` elements each.
struct AddedRows {
  std::int64_t batch = 0;
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t columns = 0;
};

/// `to` becomes to + from. Both f32, apart. threads 0: OMP_NUM_THREADS, or every core.
void add(const AddedRows& shape, const Operand& to, const Operand& from, int threads);

}  // namespace tandem::cpu
