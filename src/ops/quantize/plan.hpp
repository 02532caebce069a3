// Which of the quantiser's kernels a call takes, and which are shipped.
#pragma once

#include <vector>

#include "ops/quantize/config.hpp"
#include "plan/facts.hpp"
#include "problem/quantize_problem.hpp"

namespace tandem {

/// `config` with what a recipe decides.
constexpr QuantizeConfig with_recipe(QuantizeConfig config, const Recipe& recipe) {
  config.qk = recipe.qk;
  config.pv = recipe.pv;
  config.qk_scales = recipe.qk_scales;
  config.v_scales = recipe.v_scales;
  config.rotate_qk = recipe.rotate_qk;
  config.rotate_v = recipe.rotate_v;
  config.smooth_k = recipe.smooth_k;
  return config;
}

/// The kernel that makes the quantized values of an 8-bit call: of a quantized problem arrange_quantized, of
/// another quantize.
QuantizeConfig choose_quantize_config(const CallFacts& facts, const Recipe& recipe);

/// The kernel dequantize, for a mixed problem; `varlen`: lengths differ.
QuantizeConfig choose_dequantize_config(const Problem& asked, bool varlen);

/// The kernel of a call to quantize, whose tensor takes k's place.
QuantizeConfig choose_tensor_config(const QuantizeProblem& problem);

/// Configs that are compiled into the library: every precision at the usual models' head dimensions, in bf16.
std::vector<QuantizeConfig> shipped_quantize_configs();

}  // namespace tandem
