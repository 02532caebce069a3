// The oracle: attention by the plain formula in fp64, a triple loop. Slow, simple, and what everything is
// tested against.
#pragma once

#include <cstdint>
#include <vector>

#include "problem/problem.hpp"

namespace tandem::reference {

/// fp64 results in contiguous order: out (batch, rows_q, heads_q, head_dim_v), lse and max_logits (batch,
/// heads_q, rows_q); packed queries drop the batch dimension. Rows past a sequence's end are 0, their lse and
/// max_logits -inf.
struct Forward {
  std::vector<double> out;
  std::vector<double> lse;
  std::vector<double> max_logits;
};
struct Backward {
  std::vector<double> dq, dk, dv, dsink;
  std::vector<double> dgate;  ///< empty without a gate
  /// By captured tensor of the score function; empty but for those of reals in problem.captured_gradients.
  std::vector<std::vector<double>> captured;
};

/// Whether dropout keeps an entry of P.
bool is_kept(const Dropout& dropout, std::int64_t batch, std::int64_t head, std::int64_t query,
             std::int64_t key);

/// Element `offset` of memory of a dtype.
double stored_value(const void* data, DType dtype, std::int64_t offset);

/// Reads q, k, v and the metadata of `problem`; its output operands are not touched and need not be given.
Forward forward(const Problem& problem);

/// Gradients for problem.dout and problem.dlse. Recomputes its own fp64 forward: problem.out and problem.lse
/// are not read.
Backward backward(const Problem& problem);

}  // namespace tandem::reference
