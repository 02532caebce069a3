#include "accuracy.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "same_dtype.hpp"

namespace tandem::harness {
namespace {

constexpr Bound fp32_bound{.absolute = 0.0, .relative = 1e-5};  // contract.md: fp32 on the CPU, and every lse
constexpr double slack_16bit = 3e-5;                            // contract.md: 2 * PyTorch's error + 3e-5

double worst_error(const std::vector<double>& values, const std::vector<double>& exact) {
  double worst = 0.0;
  for (std::size_t n = 0; n < exact.size(); ++n) {
    const double error = std::abs(values[n] - exact[n]);
    if (error > worst) worst = error;  // NaN and infinities, where exact has them, do not count
  }
  return std::isfinite(worst) ? worst : 0.0;
}

Target target(std::vector<double> exact, const std::vector<double>& yardstick, DType dtype) {
  if (dtype == DType::f32) return {std::move(exact), fp32_bound};
  const double error = worst_error(yardstick, exact);
  return {std::move(exact), {.absolute = 2.0 * error + slack_16bit, .relative = 0.0}};
}

}  // namespace

Expected expect(const Problem& problem, DType dtype, Pass pass) {
  Expected e;
  if (pass == Pass::forward) {
    reference::Forward exact = reference::forward(problem);
    reference::Forward yardstick;
    if (dtype != DType::f32) yardstick = same_dtype_forward(problem, dtype);
    e.out = target(std::move(exact.out), yardstick.out, dtype);
    e.lse = {std::move(exact.lse), fp32_bound};
    return e;
  }
  reference::Backward exact = reference::backward(problem);
  reference::Backward yardstick;
  if (dtype != DType::f32) yardstick = same_dtype_backward(problem, dtype);
  e.dq = target(std::move(exact.dq), yardstick.dq, dtype);
  e.dk = target(std::move(exact.dk), yardstick.dk, dtype);
  e.dv = target(std::move(exact.dv), yardstick.dv, dtype);
  e.dsink = target(std::move(exact.dsink), yardstick.dsink, dtype);
  return e;
}

Deviation compare(const Target& target, const std::function<double(std::int64_t)>& got) {
  Deviation d;
  for (std::size_t n = 0; n < target.values.size(); ++n) {
    const auto index = static_cast<std::int64_t>(n);
    const double expected = target.values[n];
    const double value = got(index);
    double error = 0.0;
    if (std::isnan(expected) || std::isnan(value)) {
      error = std::isnan(expected) && std::isnan(value) ? 0.0 : std::numeric_limits<double>::infinity();
    } else if (value != expected) {  // also keeps inf - inf out
      error = std::abs(value - expected);
    }
    const double share = error / target.bound.at(expected);
    d.wrong += share > 1.0 ? 1 : 0;
    d.largest = std::max(d.largest, error);
    if (share > d.share) {
      d.share = share;
      d.worst = index;
    }
  }
  return d;
}

}  // namespace tandem::harness
