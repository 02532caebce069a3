#include "cpu/common/operand.hpp"

#include <cstring>
#include <limits>

namespace tandem::cpu {
namespace {

/// out 0, lse and max_logits -inf for rows [begin, end), which no sequence uses.
void clear_rows(const Problem& p, std::int64_t batch, std::int64_t begin, std::int64_t end) {
  const std::size_t bytes = static_cast<std::size_t>(p.head_dim_v) * size_of(p.out.dtype);
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t head = 0; head < p.heads_q; ++head) {
      std::memset(element(p.out, batch, row, head), 0, bytes);
      for (const Operand* x : {&p.lse, &p.max_logits}) {
        if (!x->given()) continue;
        static_cast<float*>(x->data)[x->offset(batch, row, head)] = -std::numeric_limits<float>::infinity();
      }
    }
  }
}

}  // namespace

void clear_unused(const Problem& p, std::int64_t b) {
  if (b < p.batch) {
    const Rows rows = query_rows(p, b);
    clear_rows(p, b, rows.begin + rows.used, rows.end);
  } else if (p.packed_q) {
    clear_rows(p, 0, 0, p.batch > 0 ? query_rows(p, 0).begin : p.rows_q);
    if (p.batch > 0) clear_rows(p, 0, query_rows(p, p.batch - 1).end, p.rows_q);
  }
}

}  // namespace tandem::cpu
