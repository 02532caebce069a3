// The forward pass in 8 bits finds one key among very many.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "harness/changes.hpp"
#include "harness/runner.hpp"

namespace tandem::harness {
namespace {

/// One key among 131072 carries the answer, with half or a tenth of the weight: whichever value the result is
/// most like must be that key's.
TEST(Quantized, NeedleAmongManyKeys) {
  constexpr std::int64_t keys = 131072;
  constexpr std::int64_t queries = 8;
  constexpr std::int64_t dim = 64;
  Case c = with({}, {.dtype = DType::bf16, .head_dim = dim, .seqlen_q = queries, .seqlen_k = keys});
  change(c, {.lse = false, .threads = 2});
  Call call(c);
  Random random(7);
  const auto needle_of = [](std::int64_t i) { return 16000 * i + 77 * i + 3; };
  for (std::int64_t i = 0; i < queries; ++i) {
    // A logit of log(keys) + 1/2 has the weight of all the others together.
    double norm = 0.0;
    for (std::int64_t n = 0; n < dim; ++n) norm += std::pow(call.k.get(needle_of(i) * dim + n), 2.0);
    const double logit = std::log(static_cast<double>(keys)) + (i % 2 == 0 ? 0.5 : 0.5 - std::log(9.0));
    const double factor = logit * std::sqrt(static_cast<double>(dim)) / norm;
    for (std::int64_t n = 0; n < dim; ++n)
      call.q.set(i * dim + n, factor * call.k.get(needle_of(i) * dim + n));
  }
  std::vector<float> values(static_cast<std::size_t>(keys * dim));
  for (std::int64_t i = 0; i < keys * dim; ++i)
    values[static_cast<std::size_t>(i)] = static_cast<float>(call.v.get(i));
  const auto most_like = [&](std::int64_t query) {
    double best = -1.0;
    std::int64_t at = -1;
    std::vector<float> out;
    for (std::int64_t n = 0; n < dim; ++n) out.push_back(static_cast<float>(call.out.get(query * dim + n)));
    for (std::int64_t j = 0; j < keys; ++j) {
      float dot = 0.0F;
      float norm = 0.0F;
      for (std::int64_t n = 0; n < dim; ++n) {
        const float x = values[static_cast<std::size_t>(j * dim + n)];
        dot += x * out[static_cast<std::size_t>(n)];
        norm += x * x;
      }
      const double cosine = static_cast<double>(dot / std::sqrt(norm));
      if (cosine > best) {
        best = cosine;
        at = j;
      }
    }
    return at;
  };
  for (const Precision precision : {Precision::fp8, Precision::int8}) {
    for (const bool strict_setting : {false, true}) {
      change(call.spec, {.precision = precision, .strict = strict_setting});
      call.prepare(Pass::forward);
      forward(call.forward_args(), {.threads = 2});
      for (std::int64_t i = 0; i < queries; ++i) EXPECT_EQ(most_like(i), needle_of(i)) << name_of(precision);
    }
  }
}

}  // namespace
}  // namespace tandem::harness
