#include "expect.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

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

std::string at(const Box& box, std::int64_t index) {
  std::string text;
  for (int dim = box.view().rank; dim-- > 0;) {
    const std::int64_t size = box.view().shape[static_cast<std::size_t>(dim)];
    text = fmt::format("{}{}{}", index % size, text.empty() ? "" : ", ", text);
    index /= size;
  }
  return text;
}

}  // namespace

Expected expect(const Call& call, Pass pass) {
  const Problem problem = call.problem();
  const DType dtype = call.spec.result_dtype();
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

testing::AssertionResult matches(const char* name, const Box& box, const Target& target) {
  if (!box.given()) return testing::AssertionSuccess();
  if (static_cast<std::size_t>(box.numel()) != target.values.size()) {
    return testing::AssertionFailure()
           << name << " has " << box.numel() << " elements, the oracle " << target.values.size();
  }
  std::int64_t worst = -1;
  std::int64_t wrong = 0;
  double worst_excess = 0.0;
  for (std::int64_t n = 0; n < box.numel(); ++n) {
    const double expected = target.values[static_cast<std::size_t>(n)];
    const double got = box.get(n);
    const double allowed = target.bound.absolute + target.bound.relative * std::max(1.0, std::abs(expected));
    double excess = 0.0;
    if (std::isnan(expected) || std::isnan(got)) {
      excess = std::isnan(expected) && std::isnan(got) ? 0.0 : INFINITY;
    } else if (got != expected) {  // also keeps inf - inf out
      excess = std::abs(got - expected) / allowed;
    }
    if (!(excess > 1.0)) continue;
    ++wrong;
    if (excess > worst_excess) {
      worst_excess = excess;
      worst = n;
    }
  }
  if (worst < 0) return testing::AssertionSuccess();
  const double expected = target.values[static_cast<std::size_t>(worst)];
  return testing::AssertionFailure() << fmt::format(
             "{}: {} of {} elements are wrong; the worst is [{}]: got {:.9g}, expected {:.9g}, error {:.3g}, "
             "allowed {:.3g}",
             name, wrong, box.numel(), at(box, worst), box.get(worst), expected,
             std::abs(box.get(worst) - expected),
             target.bound.absolute + target.bound.relative * std::max(1.0, std::abs(expected)));
}

testing::AssertionResult correct(Call& call, Pass pass, const Expected& e) {
  using Check = std::tuple<const char*, const Box*, const Target*>;
  std::vector<Check> checks;
  if (pass == Pass::forward) {
    checks = {Check{"out", &call.out, &e.out}, Check{"lse", &call.lse, &e.lse}};
  } else {
    checks = {Check{"dq", &call.dq, &e.dq}, Check{"dk", &call.dk, &e.dk}, Check{"dv", &call.dv, &e.dv},
              Check{"dsink", &call.dsink, &e.dsink}};
  }
  for (const auto& [name, box, target] : checks) {
    if (testing::AssertionResult result = matches(name, *box, *target); !result) return result;
    if (!box->given()) continue;
    if (const std::string where = box->changed_outside(); !where.empty()) {
      return testing::AssertionFailure() << name << ": " << where;
    }
  }
  for (const Box* input : call.inputs()) {
    if (input->given() && input->changed()) return testing::AssertionFailure() << "an input was written";
  }
  return testing::AssertionSuccess();
}

}  // namespace tandem::harness
