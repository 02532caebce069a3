#include "cpu/backward/add.hpp"

#include "cpu/common/operand.hpp"
#include "cpu/common/workspace.hpp"

namespace tandem::cpu {
namespace {

/// Rows of an operand: heads times `columns` elements each.
struct Rows {
  std::int64_t batch = 0;
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t columns = 0;

  [[nodiscard]] std::size_t bytes() const {
    return whole_lines(static_cast<std::size_t>(batch * rows * heads * columns) * sizeof(float));
  }
};

/// Calls f(gradient, its rows) of those that are added: dq, dk and dv, which are also members of `p`.
template <typename F>
void for_each_added(const Problem& p, F f) {
  const Rows q{p.packed_q ? 1 : p.batch, p.rows_q, p.heads_q, p.head_dim_qk};
  const Rows k{p.packed_k ? 1 : p.batch, p.rows_k, p.heads_kv, p.head_dim_qk};
  Rows v = k;
  v.columns = p.head_dim_v;
  if (p.adds_dq && p.dq.given()) f(&Problem::dq, q);
  if (p.adds_dk_dv && p.dk.given()) f(&Problem::dk, k);
  if (p.adds_dk_dv && p.dv.given()) f(&Problem::dv, v);
}

void add(const Rows& shape, const Operand& to, const Operand& from, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t n = 0; n < shape.batch * shape.rows; ++n) {
    for (std::int64_t head = 0; head < shape.heads; ++head) {
      auto* const sum = reinterpret_cast<float*>(element(to, n / shape.rows, n % shape.rows, head));
      const auto* const part =
          reinterpret_cast<const float*>(element(from, n / shape.rows, n % shape.rows, head));
      for (std::int64_t c = 0; c < shape.columns; ++c) sum[c] += part[c];
    }
  }
}

}  // namespace

std::size_t added_bytes(const Problem& problem) {
  std::size_t bytes = 0;
  for_each_added(problem, [&](auto /*gradient*/, const Rows& rows) { bytes += rows.bytes(); });
  return bytes;
}

Problem with_gradients_in(std::byte* memory, Problem problem) {
  for_each_added(problem, [&](Operand Problem::*gradient, const Rows& rows) {
    const std::int64_t row = rows.heads * rows.columns;
    problem.*gradient = {.data = memory,
                         .dtype = DType::f32,
                         .batch_stride = rows.batch > 1 ? rows.rows * row : 0,
                         .row_stride = row,
                         .head_stride = rows.columns};
    memory += rows.bytes();
  });
  return problem;
}

void add_gradients(const Problem& to, const Problem& from, int threads) {
  for_each_added(to, [&](Operand Problem::*gradient, const Rows& rows) {
    add(rows, to.*gradient, from.*gradient, threads);
  });
}

}  // namespace tandem::cpu
