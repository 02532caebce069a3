#include "entropy.hpp"

#include <cmath>

#include "cpu/common/convert.hpp"

namespace tandem::cli {
namespace {

double entropy_of_row(const Problem& p, std::int64_t b, std::int64_t h, std::int64_t i) {
  const KeyRange seen = visible_keys(window_of(p, b), i, p.rows_q, p.rows_k);
  const double lse = load_as_f32(p.lse.data, DType::f32, p.lse.offset(b, i, h));
  const std::int64_t query = p.q.offset(b, i, h);
  double entropy = 0.0;
  for (std::int64_t j = seen.first; j < seen.last; ++j) {
    const std::int64_t key = p.k.offset(b, j, h / p.group());
    double score = 0.0;
    for (std::int64_t c = 0; c < p.head_dim_qk; ++c) {
      score += static_cast<double>(load_as_f32(p.q.data, p.q.dtype, query + c)) *
               static_cast<double>(load_as_f32(p.k.data, p.k.dtype, key + c));
    }
    score *= static_cast<double>(p.scale);
    entropy += std::exp(score - lse) * (lse - score);
  }
  return entropy;
}

}  // namespace

std::vector<double> attention_entropy(const Problem& p) {
  std::vector<double> result;
  result.reserve(static_cast<std::size_t>(p.batch * p.heads_q * p.rows_q));
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      for (std::int64_t i = 0; i < p.rows_q; ++i) result.push_back(entropy_of_row(p, b, h, i));
    }
  }
  return result;
}

}  // namespace tandem::cli
