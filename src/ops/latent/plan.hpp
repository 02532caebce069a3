// The Config of the kernel `forward_wide` for a problem whose CallFacts::wide_heads is true.
#pragma once

#include <string>
#include <vector>

#include "ops/latent/config.hpp"
#include "plan/facts.hpp"

namespace tandem {

LatentConfig choose_latent_config(const CallFacts& facts);

/// Why a Config cannot exist, with the number that breaks the rule; empty if it can.
std::string forward_objection(const LatentConfig& config);

/// Registers that a thread which has columns of O holds, and those that it may have.
int forward_registers(const LatentConfig& config);
int forward_register_limit(const LatentConfig& config);

/// Configs that are compiled into the library.
std::vector<LatentConfig> shipped_latent_configs();

/// The choice in words, a line each.
std::vector<std::string> explain_forward(const CallFacts& facts, const LatentConfig& config);

}  // namespace tandem
