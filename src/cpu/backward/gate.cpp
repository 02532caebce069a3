#include "cpu/backward/gate.hpp"

#include <cmath>
#include <cstring>

#include "cpu/common/convert.hpp"
#include "cpu/common/operand.hpp"
#include "cpu/common/workspace.hpp"

namespace tandem::cpu {
namespace {

/// Where out is 0 so is dgate, and with it that of a query that sees no key, whatever dout and gate hold.
template <typename T>
void gate_row(const T* gate, const T* out, const T* dout, std::int64_t columns, T* to, T* dgate) {
  for (std::int64_t c = 0; c < columns; ++c) {
    const float g = to_f32(gate[c]);
    const float gradient = to_f32(dout[c]);
    to[c] = from_f32<T>(gradient / (1.0F + std::exp(-g)));
    if (dgate == nullptr) continue;
    const float value = to_f32(out[c]);
    dgate[c] = from_f32<T>(value == 0.0F ? 0.0F : gradient * value / (1.0F + std::exp(g)));
  }
}

template <typename T>
void gate_rows(const Problem& p, const Operand& to, int threads) {
  const auto at = [](const Operand& x, std::int64_t b, std::int64_t row, std::int64_t head) {
    return x.given() ? reinterpret_cast<T*>(element(x, b, row, head)) : nullptr;
  };
  const auto row_bytes = static_cast<std::size_t>(p.head_dim_v) * sizeof(T);
  const std::int64_t rows = (p.packed_q ? 1 : p.batch) * p.rows_q;
#pragma omp parallel num_threads(threads)
  {
    // All rows first, since lengths that make no sense may leave out any.
#pragma omp for schedule(static)
    for (std::int64_t n = 0; n < rows; ++n) {
      for (std::int64_t head = 0; p.dgate.given() && head < p.heads_q; ++head)
        std::memset(element(p.dgate, n / p.rows_q, n % p.rows_q, head), 0, row_bytes);
    }
    for (std::int64_t b = 0; b < p.batch; ++b) {
      const Rows used = query_rows(p, b);
#pragma omp for schedule(static)
      for (std::int64_t row = used.begin; row < used.begin + used.used; ++row) {
        for (std::int64_t head = 0; head < p.heads_q; ++head)
          gate_row<T>(at(p.gate, b, row, head), at(p.out, b, row, head), at(p.dout, b, row, head),
                      p.head_dim_v, at(to, b, row, head), at(p.dgate, b, row, head));
      }
    }
  }
}

}  // namespace

std::size_t gated_bytes(const Problem& p) {
  if (p.pass != Pass::backward || !p.gate.given()) return 0;
  const std::int64_t elements = (p.packed_q ? 1 : p.batch) * p.rows_q * p.heads_q * p.head_dim_v;
  return whole_lines(static_cast<std::size_t>(elements) * size_of(p.q.dtype));
}

Problem behind_gate(std::byte* memory, const Problem& problem, int threads) {
  Problem p = problem;
  const std::int64_t row = p.heads_q * p.head_dim_v;
  p.gated_dout = p.dout;
  p.dout = {.data = memory,
            .dtype = p.q.dtype,
            .batch_stride = p.packed_q ? 0 : p.rows_q * row,
            .row_stride = row,
            .head_stride = p.head_dim_v};
  switch (p.q.dtype) {
    case DType::f16: gate_rows<f16>(problem, p.dout, threads); break;
    case DType::bf16: gate_rows<bf16>(problem, p.dout, threads); break;
    default: gate_rows<float>(problem, p.dout, threads); break;
  }
  return p;
}

}  // namespace tandem::cpu
