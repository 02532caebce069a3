// Steps 1 to 3 of docs/numerics.md, Low precision, in f32 and in the order that page and recipe.hpp state.
#include "recipe_operands.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "element.hpp"

namespace tandem::harness {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

/// A matrix of f32 rows.
struct Matrix {
  std::int64_t rows = 0;
  std::int64_t dim = 0;
  std::vector<float> x;

  [[nodiscard]] float* row(std::int64_t i) { return x.data() + i * dim; }
};

Matrix load(const Operand& from, std::int64_t batch, const Rows& rows, std::int64_t head, std::int64_t dim) {
  Matrix m{.rows = rows.used, .dim = dim, .x = {}};
  for (std::int64_t i = 0; i < rows.used; ++i) {
    const std::int64_t at = from.offset(batch, rows.begin + i, head);
    for (std::int64_t c = 0; c < dim; ++c)
      m.x.push_back(static_cast<float>(decode(from.dtype, from.data, at + c)));
  }
  return m;
}

/// The keys that the mean is taken over: all of up to 512, of more one in each eight, at place (5i + 3) mod 8
/// of the i-th eight. They are added up in f32 by 128 at a time, and those sums in f64; what is not finite
/// counts as 0.
std::vector<float> mean_of(Matrix& m) {
  const bool sampled = m.rows > 512;
  const std::int64_t step = sampled ? 8 : 1;
  std::vector<double> sums(static_cast<std::size_t>(m.dim), 0.0);
  std::int64_t count = 0;
  for (std::int64_t first = 0; first < m.rows; first += 128 * step) {
    std::vector<float> part(static_cast<std::size_t>(m.dim), 0.0F);
    for (std::int64_t i = 0; i < 128; ++i) {
      const std::int64_t key = first + (sampled ? 8 * i + (5 * i + 3) % 8 : i);
      if (key >= m.rows) continue;
      ++count;
      for (std::int64_t c = 0; c < m.dim; ++c) {
        const float x = m.row(key)[c];
        part[static_cast<std::size_t>(c)] += std::isfinite(x) ? x : 0.0F;
      }
    }
    for (std::size_t c = 0; c < sums.size(); ++c) sums[c] += static_cast<double>(part[c]);
  }
  std::vector<float> mean;
  for (const double sum : sums)
    mean.push_back(count > 0 ? static_cast<float>(sum / static_cast<double>(count)) : 0.0F);
  return mean;
}

/// The lowest bit of splitmix64 of the channel, seed 0, as a sign.
template <typename T>
T sign_of(std::int64_t channel) {
  std::uint64_t z = (static_cast<std::uint64_t>(channel) + 1) * 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return ((z ^ (z >> 31)) & 1U) != 0 ? T(-1) : T(1);
}

/// Hadamard matrices over sqrt(size), on the powers of two that a head dimension is cut into.
template <typename T>
void hadamard(T* row, std::int64_t dim) {
  for (std::int64_t first = 0; first < dim;) {
    std::int64_t size = 1;
    while (2 * size <= dim - first) size *= 2;
    for (std::int64_t half = 1; half < size; half *= 2) {
      for (std::int64_t i = 0; i < size; ++i) {
        if ((i & half) != 0) continue;
        T& a = row[first + i];
        T& b = row[first + i + half];
        const T sum = a + b;
        b = a - b;
        a = sum;
      }
    }
    const T factor = T(1) / std::sqrt(static_cast<T>(size));
    for (std::int64_t i = 0; i < size; ++i) row[first + i] *= factor;
    first += size;
  }
}

void rotate(float* row, std::int64_t dim) {
  for (std::int64_t c = 0; c < dim; ++c) row[c] *= sign_of<float>(c);
  hadamard(row, dim);
}

double quantized(OperandType type, float x, float inverse) {
  const float limit = type == OperandType::s8 ? 127.0F : 448.0F;
  const float scaled = std::clamp(x * inverse, -limit, limit);
  return type == OperandType::s8 ? std::nearbyint(static_cast<double>(scaled))
                                 : rounded(DType::e4m3, static_cast<double>(scaled));
}

/// Rows [first, last) share a scale. In e4m3 what is not finite is a NaN; s8 has none: there it makes a row
/// of q or k NaN, or all that share a scale of v.
void quantize_group(Matrix& m, OperandType type, bool of_v, std::int64_t first, std::int64_t last,
                    QuantizedHead& to) {
  const float limit = type == OperandType::s8 ? 127.0F : 448.0F;
  float largest = 0.0F;
  bool group_finite = true;
  for (const float* x = m.row(first); x != m.row(last); ++x) {
    if (std::isfinite(*x)) largest = std::max(largest, std::abs(*x));
    group_finite = group_finite && std::isfinite(*x);
  }
  const bool zeros = largest < 0x1p-100F;
  const float scale = zeros ? 0.0F : largest / limit;
  const float inverse = zeros ? 0.0F : limit / largest;
  for (std::int64_t i = first; i < last; ++i) {
    to.scales[static_cast<std::size_t>(i)] = static_cast<double>(scale);
    const bool row_finite = std::all_of(m.row(i), m.row(i) + m.dim, [](float x) { return std::isfinite(x); });
    const bool spoilt = type == OperandType::s8 && !(of_v ? group_finite : row_finite);
    for (std::int64_t c = 0; c < m.dim; ++c) {
      const float x = m.row(i)[c];
      to.values[static_cast<std::size_t>(i * m.dim + c)] =
          spoilt || !std::isfinite(x) ? nan_value : quantized(type, x, inverse) * static_cast<double>(scale);
    }
  }
}

/// The caller's values times the caller's scales.
QuantizedHead brought(const Operand& x, const Scales& scales, std::int64_t batch, const Rows& rows,
                      std::int64_t head, std::int64_t dim) {
  QuantizedHead result;
  for (std::int64_t i = 0; i < rows.used; ++i) {
    const std::int64_t group = scales.group == ScaleGroup::row ? rows.begin + i : i / quant_block;
    const double scale =
        scales.data == nullptr
            ? 1.0
            : static_cast<double>(
                  scales.data[batch * scales.batch_stride + head / scales.heads * scales.head_stride +
                              group * scales.group_stride]);
    result.scales.push_back(std::abs(scale));
    const std::int64_t at = x.offset(batch, rows.begin + i, head);
    for (std::int64_t c = 0; c < dim; ++c) {
      // -128 has no other sign: with a negative scale it is -127 (docs/numerics.md).
      const double value = decode(x.dtype, x.data, at + c);
      result.values.push_back((value == -128.0 && scale < 0.0 ? -127.0 : value) * scale);
    }
  }
  return result;
}

}  // namespace

void rotate_back(double* row, std::int64_t dim) {
  hadamard(row, dim);
  for (std::int64_t c = 0; c < dim; ++c) row[c] *= sign_of<double>(c);
}

QuantizedHead quantized_head(const Problem& p, const Recipe& recipe, Tensor8 which, std::int64_t batch,
                             std::int64_t head) {
  const bool of_v = which == Tensor8::v;
  const Operand& x = which == Tensor8::q ? p.q : of_v ? p.v : p.k;
  const Rows rows = which == Tensor8::q ? query_rows(p, batch) : key_rows(p, batch);
  const std::int64_t dim = of_v ? p.head_dim_v : p.head_dim_qk;
  if (p.quantized_inputs()) {
    return brought(x, which == Tensor8::q ? p.q_scale : of_v ? p.v_scale : p.k_scale, batch, rows, head, dim);
  }
  Matrix m = load(x, batch, rows, head, dim);
  QuantizedHead result;
  const OperandType type = of_v ? recipe.pv : recipe.qk;
  if (which == Tensor8::k && recipe.smooth_k) {
    result.mean = mean_of(m);
    for (std::int64_t i = 0; i < m.rows; ++i) {
      for (std::int64_t c = 0; c < dim; ++c) m.row(i)[c] -= result.mean[static_cast<std::size_t>(c)];
    }
  }
  for (std::int64_t i = 0; i < m.rows && (of_v ? recipe.rotate_v : recipe.rotate_qk); ++i)
    rotate(m.row(i), dim);
  result.values.resize(m.x.size());
  result.scales.resize(static_cast<std::size_t>(m.rows));
  const ScaleGroup group = of_v ? recipe.v_scales : recipe.qk_scales;
  if (group != ScaleGroup::block && group != ScaleGroup::row)
    throw std::invalid_argument("scales by block or row");
  const std::int64_t step = group == ScaleGroup::row ? 1 : quant_block;
  for (std::int64_t first = 0; first < m.rows; first += step) {
    quantize_group(m, type, of_v, first, std::min(first + step, m.rows), result);
  }
  result.unrounded = std::move(m.x);
  return result;
}

}  // namespace tandem::harness
