// Gradients in 8 bits as docs/results/gradients-in-8-bits.md states them, in fp64, and how far from that a
// backend may be.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "runner.hpp"

namespace tandem::harness {

/// A gradient in the order of its tensor, and what f32 may change of each element: sums and statistics of
/// rows in f32, the result's own rounding, and for each number that is next to the middle of two of e4m3's,
/// the step between these.
struct GradientExpected {
  std::vector<double> values, bounds;
  std::vector<double> unrounded;  ///< with P and dS as they are
};
struct GradientsExpected {
  GradientExpected dq, dk, dv;
};

/// What backward has to give, of the call's q, k, v, dout, dlse and the out, LSE and largest logits that
/// forward has left.
GradientsExpected expect_gradients_in_8_bits(const Call& call, Accumulators accumulators = Accumulators::f32);

/// Whether the gradients are within the bounds, element by element.
testing::AssertionResult follows_recipe(const Call& call, const GradientsExpected& expected);
/// Whether they are so as a whole.
testing::AssertionResult is_near(const Call& call, const GradientsExpected& expected);

/// Runs `backward` on a call that a forward pass has written: its gradients are those of the recipe, and
/// nothing else is written.
void expect_gradients_by_recipe(Call& call, Accumulators accumulators,
                                const std::function<void(Call&)>& backward);
/// Both passes of a runner.
void run_by_gradient_recipe(Runner& runner, Call& call);

}  // namespace tandem::harness
