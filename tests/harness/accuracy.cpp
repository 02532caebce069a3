#include "accuracy.hpp"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "element.hpp"
#include "neighbour.hpp"
#include "same_dtype.hpp"

namespace tandem::harness {
namespace {

constexpr Bound fp32_bound{.absolute = 0.0, .relative = 1e-5};  // fp32 on the CPU, and every lse
constexpr double slack_16bit = 3e-5;                            // at most 2 * PyTorch's error + 3e-5

double worst_error(const std::vector<double>& values, const std::vector<double>& exact) {
  double worst = 0.0;
  for (std::size_t n = 0; n < exact.size(); ++n) {
    const double error = std::abs(values[n] - exact[n]);
    if (error > worst) worst = error;  // NaN and infinities, where exact has them, do not count
  }
  return std::isfinite(worst) ? worst : 0.0;
}

double largest(const std::vector<double>& values) {
  double result = 0.0;
  for (const double value : values) {
    if (std::isfinite(value)) result = std::max(result, std::abs(value));
  }
  return result;
}

/// The gradients of PyTorch's fused attention if it rounded nothing but out: it takes delta = sum(dout * out)
/// from the out it saved in 16 bits. Where all values are alike, true dS nearly cancels and this rounding is
/// what is left of it, while eager PyTorch, which keeps P, cancels too. Since delta and dlse enter as a
/// difference, the oracle with dlse changed by the rounding's share of delta computes exactly this.
reference::Backward rounded_out_backward(const Problem& problem, DType dtype) {
  const std::vector<double> out = reference::forward(problem).out;
  Problem changed = problem;
  std::vector<float> dlse(out.size() /
                          static_cast<std::size_t>(std::max<std::int64_t>(problem.head_dim_v, 1)));
  changed.dlse = {.data = dlse.data(),
                  .dtype = DType::f32,
                  .batch_stride = problem.packed_q ? 0 : problem.heads_q * problem.rows_q,
                  .row_stride = 1,
                  .head_stride = problem.rows_q};
  const double* row = out.data();
  for (std::int64_t b = 0; b < (problem.packed_q ? 1 : problem.batch); ++b) {
    for (std::int64_t i = 0; i < problem.rows_q; ++i) {
      for (std::int64_t head = 0; head < problem.heads_q; ++head, row += problem.head_dim_v) {
        double change = 0.0;
        for (std::int64_t c = 0; c < problem.head_dim_v; ++c) {
          const double dout =
              decode(problem.dout.dtype, problem.dout.data, problem.dout.offset(b, i, head) + c);
          change += dout * (rounded(dtype, row[c]) - row[c]);
        }
        const float given =
            problem.dlse.given()
                ? static_cast<const float*>(problem.dlse.data)[problem.dlse.offset(b, i, head)]
                : 0.0F;
        dlse[static_cast<std::size_t>(changed.dlse.offset(b, i, head))] = given - static_cast<float>(change);
      }
    }
  }
  return reference::backward(changed);
}

/// How far same-dtype PyTorch is from the exact results, by output.
struct Yardstick {
  double out = 0.0;
  double dq = 0.0;
  double dk = 0.0;
  double dv = 0.0;
  double dsink = 0.0;
  std::vector<double> captured;
};

void widen(double& error, const std::vector<double>& values, const std::vector<double>& exact) {
  error = std::max(error, worst_error(values, exact));
}

void measure(Yardstick& y, const Problem& problem, DType dtype, const reference::Forward& exact) {
  widen(y.out, same_dtype_forward(problem, dtype).out, exact.out);
}

/// The less exact of eager and fused PyTorch.
void measure(Yardstick& y, const Problem& problem, DType dtype, const reference::Backward& exact) {
  for (const reference::Backward& model :
       {same_dtype_backward(problem, dtype), rounded_out_backward(problem, dtype)}) {
    widen(y.dq, model.dq, exact.dq);
    widen(y.dk, model.dk, exact.dk);
    widen(y.dv, model.dv, exact.dv);
    widen(y.dsink, model.dsink, exact.dsink);
    y.captured.resize(exact.captured.size(), 0.0);
    for (std::size_t n = 0; n < exact.captured.size(); ++n) {
      widen(y.captured[n], model.captured[n], exact.captured[n]);
    }
  }
}

/// The largest of a few roundings is a matter of luck. For fewer scores than the first, and for fewer than
/// the second where the sink's gradient is asked for, which has but one element a head, PyTorch's error is
/// taken as the largest over problems next to the one at hand.
constexpr std::int64_t few_scores = 4096;
constexpr std::int64_t few_scores_sink = 1 << 18;
constexpr int neighbours = 8;

template <typename Result>
Yardstick yardstick(const Problem& problem, DType dtype, const Result& exact,
                    Result (*reference)(const Problem&), std::int64_t scores_of_all) {
  Yardstick y;
  if (dtype == DType::f32) return y;
  measure(y, problem, dtype, exact);
  // Gradients of tables and slopes have few elements, too.
  const bool sink_gradient = std::is_same_v<Result, reference::Backward> &&
                             (problem.sink != nullptr || problem.wants_captured_gradients());
  if (scores_of_all >= (sink_gradient ? few_scores_sink : few_scores)) return y;
  for (int n = 1; n <= neighbours; ++n) {
    const Neighbour next(problem, static_cast<std::uint64_t>(n));
    measure(y, next.problem(), dtype, reference(next.problem()));
  }
  return y;
}

Bound bound_of(DType dtype, double pytorch_error) {
  if (dtype == DType::f32) return fp32_bound;
  return {.absolute = 2.0 * pytorch_error + slack_16bit, .relative = 0.0};
}

}  // namespace

Bound gradient_bound(DType dtype, double pytorch_error, const std::vector<double>& exact) {
  // A gradient sums terms of the size of its largest elements: its small ones are what is left where they
  // cancel.
  if (dtype == DType::f32) return {.absolute = fp32_bound.relative * std::max(1.0, largest(exact))};
  return bound_of(dtype, pytorch_error);
}

Expected expect(const Problem& problem, DType dtype, Pass pass) {
  return expect(problem, dtype, pass, scores(problem));
}

Expected expect(const Problem& problem, DType dtype, Pass pass, std::int64_t scores_of_all) {
  Expected e;
  if (pass == Pass::forward) {
    reference::Forward exact = reference::forward(problem);
    const Yardstick y = yardstick(problem, dtype, exact, &reference::forward, scores_of_all);
    e.out = {std::move(exact.out), bound_of(dtype, y.out)};
    e.lse = {std::move(exact.lse), fp32_bound};
    return e;
  }
  reference::Backward exact = reference::backward(problem);
  const Yardstick y = yardstick(problem, dtype, exact, &reference::backward, scores_of_all);
  const auto fill = [&](Target& target, std::vector<double>& values, double pytorch_error) {
    target.bound = gradient_bound(dtype, pytorch_error, values);
    target.values = std::move(values);
  };
  fill(e.dq, exact.dq, y.dq);
  fill(e.dk, exact.dk, y.dk);
  fill(e.dv, exact.dv, y.dv);
  fill(e.dsink, exact.dsink, y.dsink);
  e.captured.resize(exact.captured.size());
  for (std::size_t n = 0; n < exact.captured.size(); ++n) {
    fill(e.captured[n], exact.captured[n], dtype == DType::f32 ? 0.0 : y.captured[n]);
  }
  return e;
}

Deviation compare(const Target& target, const std::function<double(std::int64_t)>& got) {
  Deviation d;
  for (std::size_t n = 0; n < target.values.size(); ++n) {
    const auto index = static_cast<std::int64_t>(n);
    const double expected = target.values[n];
    const double value = got(index);
    double error = 0.0;
    double share = 0.0;
    if (!std::isfinite(expected) || !std::isfinite(value)) {  // a bound of what is infinite would be, too
      const bool same = value == expected || (std::isnan(expected) && std::isnan(value));
      error = share = same ? 0.0 : std::numeric_limits<double>::infinity();
    } else {
      error = std::abs(value - expected);
      share = error / target.bound.at(expected);
    }
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
