// Elements of operands, and the rows that no sequence uses.
#pragma once

#include <cstddef>

#include "problem/problem.hpp"

namespace tandem::cpu {

/// Element (batch, row, head) of an operand.
template <typename Byte = std::byte>
Byte* element(const Operand& o, std::int64_t batch, std::int64_t row, std::int64_t head) {
  return static_cast<Byte*>(o.data) +
         o.offset(batch, row, head) * static_cast<std::int64_t>(size_of(o.dtype));
}

/// out 0, lse and max_logits -inf in the unused rows of sequence b; b == batch stands for the packed rows
/// before the first and after the last sequence.
void clear_unused(const Problem& p, std::int64_t b);

}  // namespace tandem::cpu
