// A Problem and its Plan as text.
#pragma once

#include <string>

#include "ops/plan.hpp"
#include "problem/problem.hpp"

namespace tandem {

std::string explain(const Problem& problem, const Plan& plan, const Execution& execution);

}  // namespace tandem
