// Which of the quantiser's kernels a call takes, and which are shipped.
#pragma once

#include <vector>

#include "api/problem.hpp"
#include "kernels/quantize_config.hpp"

namespace tandem {

QuantizeConfig choose_quantize_config(const Problem& problem, const Recipe& recipe);

/// `config` with only what the kernel of K's mean depends on: one serves many recipes.
QuantizeConfig mean_config(const QuantizeConfig& config);

/// Configs that are compiled into the library: every precision at the usual models' head dimensions, in bf16.
std::vector<QuantizeConfig> shipped_quantize_configs();

}  // namespace tandem
