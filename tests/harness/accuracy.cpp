#include "accuracy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "neighbour.hpp"
#include "same_dtype.hpp"

namespace tandem::harness {
namespace {

constexpr Bound fp32_bound{.absolute = 0.0, .relative = 1e-5};  // fp32 on the CPU, and every lse
constexpr double slack_16bit = 3e-5;                            // at most 2 * PyTorch's error + 3e-5

// Bounds of RMS and gain; records/numerics.md derives them.
constexpr double times_fused = 1.5;
/// Half of bf16's last digit, as a share, which P's roundings have in common where logits are alike; and
/// f32's share, which is less than a fiftieth of that.
constexpr double gain_bound = 0.004;
constexpr double deviations = 6.0;
/// Standard deviation of the difference of two squares of roundings, which are even between -1 and 1, as a
/// share of their mean: the root of 2 times 0.9.
constexpr double square_deviation = 1.27;
/// The largest of few_elements normal errors is four root mean squares.
constexpr double largest_over_rms = 4.0;

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

/// How far the models of PyTorch are from the exact values of an output.
struct Yardstick {
  double largest = 0.0;  ///< error of the less exact model
  Sums fused;            ///< of the fused one
};

struct Yardsticks {
  Yardstick out, dq, dk, dv, dsink, dgate;
  std::vector<Yardstick> captured;
};

Sums sums_of(const std::vector<double>& values, const std::vector<double>& exact) {
  Sums sums;
  for (std::size_t n = 0; n < exact.size(); ++n) sums.add(exact[n], values[n]);
  return sums;
}

void widen(Yardstick& y, const std::vector<double>& values, const std::vector<double>& exact) {
  y.largest = std::max(y.largest, worst_error(values, exact));
}

void widen(Sums& fused, const std::vector<double>& values, const std::vector<double>& exact) {
  const Sums sums = sums_of(values, exact);
  if (fused.count == 0.0 || sums.rms() > fused.rms()) fused = sums;
}

/// Eager PyTorch is the less exact one; the bound of elements is that one's.
void measure(Yardsticks& y, const Problem& problem, DType dtype, const reference::Forward& exact) {
  widen(y.out, same_dtype_forward(problem, dtype, Model::eager).out, exact.out);
  widen(y.out.fused, same_dtype_forward(problem, dtype, Model::fused).out, exact.out);
}

void measure(Yardsticks& y, const Problem& problem, DType dtype, const reference::Backward& exact) {
  y.captured.resize(exact.captured.size());
  for (const Model model : {Model::eager, Model::fused}) {
    const reference::Backward found = same_dtype_backward(problem, dtype, model);
    const auto measure_one = [model](Yardstick& one, const std::vector<double>& values,
                                     const std::vector<double>& right) {
      widen(one, values, right);
      if (model == Model::fused) widen(one.fused, values, right);
    };
    measure_one(y.dq, found.dq, exact.dq);
    measure_one(y.dk, found.dk, exact.dk);
    measure_one(y.dv, found.dv, exact.dv);
    measure_one(y.dsink, found.dsink, exact.dsink);
    measure_one(y.dgate, found.dgate, exact.dgate);
    for (std::size_t n = 0; n < exact.captured.size(); ++n) {
      measure_one(y.captured[n], found.captured[n], exact.captured[n]);
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
Yardsticks yardsticks(const Problem& problem, DType dtype, const Result& exact,
                      Result (*reference)(const Problem&), std::int64_t scores_of_all) {
  Yardsticks y;
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

Target target_of(DType dtype, std::vector<double> exact, const Bound& bound, const Sums& fused,
                 double queries, std::int64_t row) {
  const double f32 = fp32_bound.relative * std::max(1.0, largest(exact));
  return {.values = std::move(exact),
          .bound = bound,
          .fused = fused,
          .f32_rms = dtype == DType::f32 ? f32 : f32 / largest_over_rms,
          .queries = queries,
          .row = static_cast<std::size_t>(std::max<std::int64_t>(row, 1))};
}

double queries_of(const Problem& p) {
  std::int64_t queries = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) queries += query_rows(p, b).used * p.heads_q;
  return static_cast<double>(queries);
}

/// How many equal rows would have as much luck: of rows whose squares' sums are s, (sum s)^2 / sum s^2.
double rows_that_count(const Target& target) {
  double sum = 0.0;
  double squares = 0.0;
  for (std::size_t first = 0; first < target.values.size(); first += target.row) {
    double of_row = 0.0;
    for (std::size_t n = first; n < std::min(first + target.row, target.values.size()); ++n) {
      const double x = target.values[n];
      of_row += std::isfinite(x) ? x * x : 0.0;
    }
    sum += of_row;
    squares += of_row * of_row;
  }
  return squares > 0.0 ? sum * sum / squares : 1.0;
}

/// Fills in the bounds of a whole tensor, whose sums `d` has, and their shares.
void compare_whole(const Target& target, Deviation& d) {
  if (target.queries <= 0.0 || target.values.size() < few_elements || d.sums.count == 0.0) return;
  const double rows = rows_that_count(target);
  const double luck = std::sqrt(1.0 + deviations * square_deviation / std::sqrt(rows));
  d.rms_bound = std::max(times_fused, luck) * target.fused.rms() + target.f32_rms;
  // What errors within that may make of the gain: all of it if few make them, else six deviations.
  const double size = std::sqrt(d.sums.squares / d.sums.count);
  const double chance = std::min(1.0, deviations / std::sqrt(std::min(rows, target.queries))) * d.rms_bound;
  d.gain_bound = std::max(gain_bound, times_fused * std::abs(target.fused.gain() - 1.0));
  if (chance > d.gain_bound * size) d.gain_bound = chance / size;  // without bound where all should be 0
  d.share = std::max({d.share, d.sums.rms() / d.rms_bound, d.gain_error() / d.gain_bound});
}

}  // namespace

void Sums::add(double expected, double value) {
  if (!std::isfinite(expected) || !std::isfinite(value)) return;
  const double error = value - expected;
  count += 1.0;
  squares += expected * expected;
  errors += error * error;
  products += error * expected;
}

void Sums::add(const Sums& other) {
  count += other.count;
  squares += other.squares;
  errors += other.errors;
  products += other.products;
}

double Sums::rms() const {
  return count > 0.0 ? std::sqrt(errors / count) : 0.0;
}

double Sums::gain() const {
  return squares > 0.0 ? 1.0 + products / squares : 1.0;
}

std::string Deviation::complaint() const {
  std::vector<std::string> all;
  if (wrong > 0) all.push_back(fmt::format("{} are wrong", wrong));
  if (has_whole_bounds() && sums.rms() > rms_bound) {
    all.push_back(fmt::format("the RMS of the error is {:.3g}, allowed {:.3g}", sums.rms(), rms_bound));
  }
  if (has_whole_bounds() && gain_error() > gain_bound) {
    all.push_back(fmt::format("the gain is {:.5g}, allowed 1 within {:.2g}", sums.gain(), gain_bound));
  }
  return fmt::format("{}", fmt::join(all, "; "));
}

Target gradient_target(DType dtype, std::vector<double> exact, double pytorch_error, const Sums& fused,
                       double queries, std::int64_t row) {
  // A gradient sums terms of the size of its largest elements: its small ones are what is left where they
  // cancel.
  const Bound bound = dtype == DType::f32
                          ? Bound{.absolute = fp32_bound.relative * std::max(1.0, largest(exact))}
                          : bound_of(dtype, pytorch_error);
  return target_of(dtype, std::move(exact), bound, fused, queries, row);
}

Expected expect(const Problem& problem, DType dtype, Pass pass) {
  return expect(problem, dtype, pass, scores(problem));
}

Expected expect(const Problem& problem, DType dtype, Pass pass, std::int64_t scores_of_all) {
  Expected e;
  const double queries = queries_of(problem);
  if (pass == Pass::forward) {
    reference::Forward exact = reference::forward(problem);
    const Yardsticks y = yardsticks(problem, dtype, exact, &reference::forward, scores_of_all);
    e.out = target_of(dtype, std::move(exact.out), bound_of(dtype, y.out.largest), y.out.fused, queries,
                      problem.head_dim_v);
    e.lse.values = std::move(exact.lse);
    e.max_logits.values = std::move(exact.max_logits);
    e.lse.bound = e.max_logits.bound = fp32_bound;
    return e;
  }
  reference::Backward exact = reference::backward(problem);
  Yardsticks y = yardsticks(problem, dtype, exact, &reference::backward, scores_of_all);
  const auto target = [&](std::vector<double>& values, const Yardstick& of, std::int64_t row) {
    return gradient_target(dtype, std::move(values), of.largest, of.fused, queries, row);
  };
  e.dq = target(exact.dq, y.dq, problem.head_dim_qk);
  e.dk = target(exact.dk, y.dk, problem.head_dim_qk);
  e.dv = target(exact.dv, y.dv, problem.head_dim_v);
  e.dsink = target(exact.dsink, y.dsink, 1);
  e.dgate = target(exact.dgate, y.dgate, problem.head_dim_v);
  y.captured.resize(exact.captured.size());
  for (std::size_t n = 0; n < exact.captured.size(); ++n) {
    e.captured.push_back(target(exact.captured[n], y.captured[n], 1));
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
    d.sums.add(expected, value);
    d.wrong += share > 1.0 ? 1 : 0;
    d.largest = std::max(d.largest, error);
    if (share > d.worst_share) {
      d.worst_share = share;
      d.worst = index;
    }
  }
  d.share = d.worst_share;
  compare_whole(target, d);
  return d;
}

}  // namespace tandem::harness
