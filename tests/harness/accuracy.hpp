// The contract's accuracy rule: what every output should hold, how far off it may be, how far off it is. Free
// of any test framework: `tandem verify` applies the same rule.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/reference.hpp"
#include "problem/problem.hpp"

namespace tandem::harness {

/// |got - expected| <= absolute + relative * max(1, |expected|).
struct Bound {
  double absolute = 0.0;
  double relative = 0.0;
  [[nodiscard]] double at(double expected) const {
    return absolute + relative * std::fmax(1.0, std::abs(expected));
  }
};

/// What an output should hold, in logical order, and how far off it may be. NaN must be NaN, infinities must
/// be equal.
struct Target {
  std::vector<double> values;
  Bound bound;
};

struct Expected {
  Target out, lse;
  Target dq, dk, dv, dsink;
  std::vector<Target> captured;  ///< by the numbers of captured tensors; empty: not asked for
};

/// The oracle's results and the bounds: 1e-5 relative in fp32 (gradients: of the largest element) and for
/// lse; else twice the error of same-dtype PyTorch plus 3e-5; for gradients the less exact one of eager and
/// fused PyTorch. `dtype` is that of the outputs. Fills out and lse, or the gradients.
Expected expect(const Problem& problem, DType dtype, Pass pass);
/// The same for a part of a problem that has `scores_of_all` scores: where these are few, the bounds are
/// those of neighbouring problems, too.
Expected expect(const Problem& problem, DType dtype, Pass pass, std::int64_t scores_of_all);

/// The bound of a gradient whose exact values are `exact` and of which same-dtype PyTorch is off by
/// `pytorch_error`.
Bound gradient_bound(DType dtype, double pytorch_error, const std::vector<double>& exact);

/// How an output differs from its target.
struct Deviation {
  std::int64_t wrong = 0;   ///< elements beyond the bound
  std::int64_t worst = -1;  ///< the element that uses most of its bound; -1 where all are exact
  double share = 0.0;       ///< error of that element as a share of its bound: at most 1 if right
  double largest = 0.0;     ///< largest absolute error of any element
};

/// `got` gives the output's elements in logical order; it is asked for target.values.size() of them.
Deviation compare(const Target& target, const std::function<double(std::int64_t)>& got);

}  // namespace tandem::harness
