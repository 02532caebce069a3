// What a Precision means: its Recipe, and the Recipe in words.
#pragma once

#include <string>

#include "kernels/recipe.hpp"
#include "tandem/attention.hpp"

namespace tandem {

/// `precision` is not exact.
Recipe recipe_of(Precision precision, bool strict);

/// One line for explain.
std::string describe(const Recipe& recipe);

}  // namespace tandem
