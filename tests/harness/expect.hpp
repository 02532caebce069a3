// Comparison with the oracle by the contract's accuracy rule.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "accuracy.hpp"
#include "call.hpp"

namespace tandem::harness {

/// The oracle's results for a Call, and the bounds: 1e-5 relative in fp32 and for lse; else twice the error
/// of same-dtype PyTorch plus 3e-5. Backward only where `pass` says so.
Expected expect(const Call& call, Pass pass);

/// Success if `box` holds what `target` says; else the worst element: where, got, expected, error, bound.
testing::AssertionResult matches(const char* name, const Box& box, const Target& target);

/// Everything a finished pass promises: outputs match, nothing around them was written, no input was changed.
testing::AssertionResult correct(Call& call, Pass pass, const Expected& expected);

}  // namespace tandem::harness
