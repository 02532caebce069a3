// What a mask function says of a whole range of pairs, by interval arithmetic, which looks into tensors of
// integers that are read by one index: blocks that it hides or shows altogether need no evaluation.
#pragma once

#include <cstdint>

#include "cpu/functions/program.hpp"
#include "problem/interval.hpp"

namespace tandem::cpu {

struct PairRange {
  std::int64_t batch = 0;
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  Interval head, query, key;
};

/// `some` also where nothing is known.
enum class Visible { none, some, all };

Visible visible_of(const FunctionProgram& mask, const PairRange& range);

}  // namespace tandem::cpu
