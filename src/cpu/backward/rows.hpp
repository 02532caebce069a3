// One head's rows of a Problem's operands, for the backward pass.
#pragma once

#include <cstring>

#include "cpu/backward/block.hpp"
#include "problem/problem.hpp"

namespace tandem::cpu {

inline HeadRows head_rows(const Operand& x, std::int64_t batch, std::int64_t first_row, std::int64_t head) {
  if (!x.given()) return {};
  auto* bytes = static_cast<std::byte*>(x.data);
  return {.data = bytes + x.offset(batch, first_row, head) * static_cast<std::int64_t>(size_of(x.dtype)),
          .row_stride = x.row_stride};
}

inline void clear_rows(const Operand& x, std::int64_t batch, std::int64_t first, std::int64_t last,
                       std::int64_t head, std::int64_t head_dim) {
  if (!x.given()) return;
  for (std::int64_t row = first; row < last; ++row) {
    std::memset(head_rows(x, batch, row, head).data, 0,
                static_cast<std::size_t>(head_dim) * size_of(x.dtype));
  }
}

}  // namespace tandem::cpu
