#include "neighbour.hpp"

#include <algorithm>
#include <cmath>

#include "element.hpp"

namespace tandem::harness {

Neighbour::Neighbour(const Problem& original, std::uint64_t seed) : problem_(original), state_(seed) {
  Problem& p = problem_;
  p.q = moved(p.q, p.packed_q, p.rows_q, p.heads_q, p.head_dim_qk);
  p.k = moved(p.k, p.packed_k, p.rows_k, p.heads_kv, p.head_dim_qk);
  p.v = moved(p.v, p.packed_k, p.rows_k, p.heads_kv, p.head_dim_v);
  if (p.gate.given()) p.gate = moved(p.gate, p.packed_q, p.rows_q, p.heads_q, p.head_dim_v);
  if (p.dout.given()) p.dout = moved(p.dout, p.packed_q, p.rows_q, p.heads_q, p.head_dim_v);
}

Operand Neighbour::moved(const Operand& x, bool packed, std::int64_t rows, std::int64_t heads,
                         std::int64_t dim) {
  const std::int64_t batch = packed ? 1 : problem_.batch;
  std::vector<std::byte>& memory =
      memory_.emplace_back(static_cast<std::size_t>(batch * rows * heads * dim) * size_of(x.dtype));
  const Operand copy{.data = memory.data(),
                     .dtype = x.dtype,
                     .batch_stride = packed ? 0 : rows * heads * dim,
                     .row_stride = heads * dim,
                     .head_stride = dim};
  const double unit = x.dtype == DType::bf16 ? 0x1p-7 : x.dtype == DType::f16 ? 0x1p-10 : 0x1p-3;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t head = 0; head < heads; ++head) {
        for (std::int64_t c = 0; c < dim; ++c) {
          const double value = decode(x.dtype, x.data, x.offset(b, row, head) + c);
          state_ = state_ * 6364136223846793005U +
                   1442695040888963407U;  // Knuth's generator; its high bits are good
          const double step =
              static_cast<double>(state_ >> 62) - 1.0;  // -1, 0, 1 or 2 halves of at most a unit
          encode(x.dtype, copy.data, copy.offset(b, row, head) + c, value * (1.0 + 0.5 * unit * step));
        }
      }
    }
  }
  return copy;
}

std::int64_t scores(const Problem& p) {
  std::int64_t count = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t keys = p.indices.given() ? p.indices.count : key_rows(p, b).used;
    count += query_rows(p, b).used * keys * p.heads_q;
  }
  return count;
}

}  // namespace tandem::harness
