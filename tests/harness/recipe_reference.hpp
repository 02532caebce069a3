// 8-bit attention as docs/numerics.md states it, in fp64, and how far from that a backend may be: what the
// recipe rounds besides its operands, P above all, bounds it.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "call.hpp"

namespace tandem::harness {

/// fp64 attention on the operands that the recipe's quantized values stand for, with P as it is, and what the
/// rounding of P and of sums may change, in the order of reference::Forward.
struct RecipeExpected {
  std::vector<double> out, out_bound;
  std::vector<double> lse, lse_bound;
  std::vector<double> max_logits, max_bound;
  /// How far the gain of out as a whole (its projection on what is expected) may be from 1: where errors of
  /// single elements hide one of all, this one shows it.
  double gain_bound = 0.0;
};

/// Whose e4m3 accumulator: one that is cut once after every 32 products, as the recipe says, or that of
/// tensor cores, which cut each product and the sum at the digit that the largest of them has no room for.
enum class Accumulator { recipe, tensor_cores };

/// What a call has to give by `recipe`; its precision, or the values and scales that its caller brings, must
/// be those of the recipe.
RecipeExpected expect_recipe(const Call& call, const Recipe& recipe,
                             Accumulator accumulator = Accumulator::recipe);
/// By the recipe of the call's own precision.
RecipeExpected expect_recipe(const Call& call, Accumulator accumulator = Accumulator::recipe);

/// The gain of out: its projection on what is expected, 1 if both agree.
double gain_of(const Box& out, const RecipeExpected& expected);

/// Whether out, lse and max_logits are within the bounds, element by element, and the gain of out as a whole.
testing::AssertionResult follows_recipe(const Call& call, const RecipeExpected& expected);

}  // namespace tandem::harness
