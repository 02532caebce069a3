#include "cpu/cache/merge.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "cpu/common/config.hpp"
#include "cpu/common/convert.hpp"
#include "cpu/common/operand.hpp"
#include "cpu/targets/kernels.hpp"

namespace tandem::cpu {
namespace {

constexpr double minus_infinity = -std::numeric_limits<double>::infinity();

/// The merged LSE of a row, and what is left of its parts: those that are not empty, with their weights.
struct Weights {
  std::vector<const void*> from;
  std::vector<double> weights;
  double lse = minus_infinity;

  explicit Weights(std::size_t parts) {
    from.reserve(parts);
    weights.reserve(parts);
  }

  void find(const MergeProblem& problem, std::int64_t b, std::int64_t row, std::int64_t head) {
    from.clear();
    weights.clear();
    lse = minus_infinity;
    double largest = minus_infinity;
    bool finite = true;
    for (const MergePart& part : problem.parts) {
      const auto value =
          static_cast<double>(*reinterpret_cast<const float*>(element(part.lse, b, row, head)));
      if (value == minus_infinity) continue;
      finite = finite && std::isfinite(value);
      largest = std::max(largest, value);
      from.push_back(element(part.out, b, row, head));
      weights.push_back(value);
    }
    if (from.empty()) return;
    if (!finite) {
      lse = std::numeric_limits<double>::quiet_NaN();
      return;
    }
    double sum = 0.0;
    for (double& w : weights) sum += w = std::exp(w - largest);
    for (double& w : weights) w /= sum;
    lse = largest + std::log(sum);
  }
};

/// Every element of a row of out becomes `value`.
void fill(const MergeProblem& problem, std::byte* row, float value) {
  for (std::int64_t c = 0; c < problem.head_dim; ++c) store_from_f32(row, problem.out.dtype, c, value);
}

void merge_row(const MergeProblem& problem, const CacheKernel& kernel, Weights& weights, std::int64_t n) {
  const std::int64_t head = n % problem.heads;
  const std::int64_t row = n / problem.heads % problem.rows;
  const std::int64_t b = n / problem.heads / problem.rows;
  weights.find(problem, b, row, head);
  std::byte* const to = element(problem.out, b, row, head);
  if (problem.lse.given()) {
    *reinterpret_cast<float*>(element(problem.lse, b, row, head)) = static_cast<float>(weights.lse);
  }
  if (weights.from.empty()) return fill(problem, to, 0.0F);
  if (std::isnan(weights.lse)) return fill(problem, to, std::numeric_limits<float>::quiet_NaN());
  const DType dtype = problem.parts.front().out.dtype;
  if (weights.from.size() == 1 && dtype == problem.out.dtype) {
    std::memcpy(to, weights.from.front(), static_cast<std::size_t>(problem.head_dim) * size_of(dtype));
    return;
  }
  kernel.merge({.from = weights.from.data(),
                .weights = weights.weights.data(),
                .parts = static_cast<int>(weights.from.size()),
                .from_dtype = dtype,
                .to = to,
                .to_dtype = problem.out.dtype,
                .dim = static_cast<int>(problem.head_dim)});
}

}  // namespace

void merge(const MergeProblem& problem, Target target, int wanted_threads) {
  const CacheKernel& kernel = kernels(target).cache;
  const int threads = usable_threads(wanted_threads);
  // Memory first: an exception that left a thread of the region would end the process.
  std::vector<Weights> of_thread;
  of_thread.reserve(static_cast<std::size_t>(threads));
  for (int n = 0; n < threads; ++n) of_thread.emplace_back(problem.parts.size());
#pragma omp parallel num_threads(threads)
  {
    Weights weights = std::move(of_thread[static_cast<std::size_t>(omp_get_thread_num())]);
#pragma omp for schedule(static)
    for (std::int64_t n = 0; n < problem.count(); ++n) merge_row(problem, kernel, weights, n);
  }
}

}  // namespace tandem::cpu
