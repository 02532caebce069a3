// The contract's accuracy rule: what every output should hold, how far off it may be, how far off it is. Free
// of any test framework: `tandem verify` applies the same rule.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cpu/reference/reference.hpp"
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

/// Sums over the finite elements of a tensor and what they should be, for two figures of all of them: the
/// root mean square (RMS) of their errors, and the gain, the regression of the tensor on what it should be.
struct Sums {
  double count = 0.0;
  double squares = 0.0;   ///< of what elements should be
  double errors = 0.0;    ///< squares of the errors
  double products = 0.0;  ///< of each error with what the element should be

  void add(double expected, double value);
  void add(const Sums& other);
  [[nodiscard]] double rms() const;   ///< of the errors
  [[nodiscard]] double gain() const;  ///< 1 of exact results
};

/// What an output should hold, in logical order, and how far off it may be. NaN must be NaN, infinities must
/// be equal.
struct Target {
  std::vector<double> values;
  Bound bound;
  /// For the bounds of RMS and gain, which a Target with queries has from few_elements elements on: what a
  /// fused 16-bit attention makes of the tensor, what f32 may add to its RMS, and the queries, summed over
  /// heads and sequences, that its roundings come from.
  Sums fused;
  double f32_rms = 0.0;
  double queries = 0.0;
  std::size_t row = 1;  ///< elements that roundings have in common: a head's
};
constexpr std::size_t few_elements = 4096;

struct Expected {
  Target out, lse, max_logits;
  Target dq, dk, dv, dsink, dgate;
  std::vector<Target> captured;  ///< by the numbers of captured tensors; empty: not asked for
};

/// The oracle's results and the bounds: 1e-5 relative in fp32 (gradients: of the largest element) and for
/// lse and max_logits; else twice the error of same-dtype PyTorch plus 3e-5, for gradients the less exact one
/// of eager and fused PyTorch, and those of RMS and gain. `dtype` is that of the outputs. Fills those of the
/// forward pass, or the gradients.
Expected expect(const Problem& problem, DType dtype, Pass pass);
/// The same for a part of a problem that has `scores_of_all` scores: where these are few, the bounds are
/// those of neighbouring problems, too.
Expected expect(const Problem& problem, DType dtype, Pass pass, std::int64_t scores_of_all);

/// A gradient whose exact values are `exact`, of which same-dtype PyTorch is off by `pytorch_error` and fused
/// attention by `fused`. `queries` and `row` as a Target has them.
Target gradient_target(DType dtype, std::vector<double> exact, double pytorch_error, const Sums& fused,
                       double queries, std::int64_t row);

/// How an output differs from its target.
struct Deviation {
  std::int64_t wrong = 0;    ///< elements beyond the bound
  std::int64_t worst = -1;   ///< the element that uses most of its bound; -1 where all are exact
  double worst_share = 0.0;  ///< error of that element as a share of its bound
  double largest = 0.0;      ///< largest absolute error of any element
  Sums sums;                 ///< of all elements
  double rms_bound = 0.0;    ///< 0: the target has no bounds of RMS and gain
  double gain_bound = 0.0;   ///< of the gain's distance from 1
  double share = 0.0;        ///< the largest share of its bound of worst element, RMS and gain

  [[nodiscard]] bool right() const { return share <= 1.0; }
  [[nodiscard]] bool has_whole_bounds() const { return rms_bound > 0.0; }
  [[nodiscard]] double gain_error() const { return std::abs(sums.gain() - 1.0); }
  /// What is wrong: "7 are wrong; the RMS of the error is 0.01, allowed 0.003; the gain is 1.02, allowed 1
  /// within 0.004". Empty if nothing is.
  [[nodiscard]] std::string complaint() const;
};

/// `got` gives the output's elements in logical order; it is asked for target.values.size() of them.
Deviation compare(const Target& target, const std::function<double(std::int64_t)>& got);

}  // namespace tandem::harness
