// A Problem and its Plan as text.
#pragma once

#include <string>

#include "api/problem.hpp"
#include "plan/plan.hpp"

namespace tandem {

std::string explain(const Problem& problem, const Plan& plan, const Execution& execution);

}  // namespace tandem
