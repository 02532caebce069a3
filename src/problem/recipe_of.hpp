// What a Precision means: its Recipe, and the Recipe in words.
#pragma once

#include <string>

#include "problem/problem.hpp"
#include "problem/recipe.hpp"

namespace tandem {

/// `precision` is not exact.
Recipe recipe_of(Precision precision, bool strict);

/// What a problem with a precision follows: of caller-supplied quantized values, nothing is left but
/// their groups of scales, which are blocks (as larger ones are taken) or, if one tensor has them or
/// the values are s8, rows.
Recipe recipe_of(const Problem& problem);

/// One line for explain.
std::string describe(const Recipe& recipe);

}  // namespace tandem
