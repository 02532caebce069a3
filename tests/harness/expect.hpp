// Comparison with the oracle by the contract's accuracy rule.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "call.hpp"
#include "cpu/reference.hpp"

namespace tandem::harness {

/// |got - expected| <= absolute + relative * max(1, |expected|).
struct Bound {
  double absolute = 0.0;
  double relative = 0.0;
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
};

/// The oracle's results for a Call, and the bounds: 1e-5 relative in fp32 and for lse; else twice the error
/// of same-dtype PyTorch plus 3e-5. Backward only where `pass` says so.
Expected expect(const Call& call, Pass pass);

/// Success if `box` holds what `target` says; else the worst element: where, got, expected, error, bound.
testing::AssertionResult matches(const char* name, const Box& box, const Target& target);

/// Everything a finished pass promises: outputs match, nothing around them was written, no input was changed.
testing::AssertionResult correct(Call& call, Pass pass, const Expected& expected);

}  // namespace tandem::harness
