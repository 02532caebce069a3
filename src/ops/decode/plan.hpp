// The Config of the kernel `decode` for a problem whose CallFacts::decodes is true.
#pragma once

#include <string>
#include <vector>

#include "ops/decode/config.hpp"
#include "plan/facts.hpp"

namespace tandem {

DecodeConfig choose_decode_config(const CallFacts& facts);

/// Why a Config cannot exist, with the number that breaks the rule; empty if it can.
std::string forward_objection(const DecodeConfig& config);

/// Registers that a consumer thread holds, and those that it may have.
int forward_registers(const DecodeConfig& config);
int forward_register_limit(const DecodeConfig& config);

/// Configs that are compiled into the library.
std::vector<DecodeConfig> shipped_decode_configs();

/// The choice in words, a line each.
std::vector<std::string> explain_forward(const CallFacts& facts, const DecodeConfig& config);

}  // namespace tandem
