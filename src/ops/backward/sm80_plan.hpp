// The Config of the backward kernels of the family sm80 for a problem: a table of tiles by the shared memory
// of an SM.
#pragma once

#include <string>
#include <vector>

#include "ops/backward/sm80/config.hpp"
#include "plan/facts.hpp"

namespace tandem {

/// The widest heads that these kernels have a tile for.
constexpr int max_sm80_backward_head_dim = 256;

/// Why a Config cannot exist where an SM has so much shared memory; empty if it can.
std::string backward_objection(const Sm80BackwardConfig& config,
                               int shared_bytes_per_sm = hopper_shared_bytes_per_sm);

/// The Config for a 16-bit backward call with head dimensions up to max_sm80_backward_head_dim.
Sm80BackwardConfig choose_sm80_backward_config(const CallFacts& facts);

/// Configs that tests compile for every architecture: full, causal, and with every feature in a fixed order,
/// of each line that a GPU with so much shared memory takes.
std::vector<Sm80BackwardConfig> sm80_backward_configs(int shared_bytes_per_sm);

/// The choice in words, a line each.
std::vector<std::string> explain_backward(const CallFacts& facts, const Sm80BackwardConfig& config);

}  // namespace tandem
