// Matrices of values that a dtype holds, and their products as one operator rounds them.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/common/vector_clones.hpp"
#include "rounding.hpp"

namespace tandem::harness {

/// round_fast of `n` numbers.
TANDEM_VECTOR_CLONES static inline void round_row(DType dtype, float* x, std::int64_t n) {
  if (dtype == DType::bf16) {
    for (std::int64_t j = 0; j < n; ++j) x[j] = round_bf16(x[j]);
  } else if (dtype == DType::f16) {
    for (std::int64_t j = 0; j < n; ++j) x[j] = round_f16(x[j]);
  }
}

/// A row-major matrix of values that the dtype holds.
struct Matrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<float> data;

  Matrix() = default;
  Matrix(std::int64_t rows_, std::int64_t cols_)
      : rows(rows_), cols(cols_), data(static_cast<std::size_t>(rows_ * cols_), 0.0F) {}
  [[nodiscard]] float* row(std::int64_t r) { return data.data() + r * cols; }
  [[nodiscard]] const float* row(std::int64_t r) const { return data.data() + r * cols; }
};

inline Matrix transposed(const Matrix& a) {
  Matrix t(a.cols, a.rows);
  for (std::int64_t r = 0; r < a.rows; ++r) {
    for (std::int64_t c = 0; c < a.cols; ++c) t.row(c)[r] = a.row(r)[c];
  }
  return t;
}

/// y += a * x.
TANDEM_VECTOR_CLONES static inline void accumulate(float* y, float a, const float* x, std::int64_t n) {
#pragma omp simd
  for (std::int64_t j = 0; j < n; ++j) y[j] += a * x[j];
}

/// a @ b: fp32 sums, one rounding. Entries of `a` that are 0 are skipped, so that a row of b nobody weighs
/// may be NaN.
inline Matrix matmul(const Matrix& a, const Matrix& b, DType dtype) {
  Matrix c(a.rows, b.cols);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    float* row = c.row(i);
    for (std::int64_t n = 0; n < a.cols; ++n) {
      const float weight = a.row(i)[n];
      if (weight == 0.0F) continue;
      accumulate(row, weight, b.row(n), b.cols);
    }
    round_row(dtype, row, b.cols);
  }
  return c;
}

}  // namespace tandem::harness
