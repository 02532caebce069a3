// The Config of the kernel `sm80_forward` for a problem: a table of tiles by the shared memory of an SM.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "ops/forward/sm80/config.hpp"
#include "plan/facts.hpp"

namespace tandem {

/// One line of the heuristics: the tile for head dimensions up to these, where an SM has so much shared
/// memory.
struct Sm80ForwardTileLine {
  int head_dim_qk;
  int head_dim_v;
  int shared_kilobytes;  ///< what an SM has, at least
  int block_m;
  int block_n;
  const char* why;
};

/// Narrowest head dimensions and most shared memory first. A problem takes the first line it fits.
std::span<const Sm80ForwardTileLine> sm80_forward_tiles();

/// Why a Config cannot exist where an SM has so much shared memory; empty if it can.
std::string forward_objection(const Sm80ForwardConfig& config,
                              int shared_bytes_per_sm = hopper_shared_bytes_per_sm);

/// The Config for a forward call with head dimensions up to 256, of 16 bits.
Sm80ForwardConfig choose_sm80_forward_config(const CallFacts& facts);

/// Configs that tests compile for every architecture: dense, causal, and with lengths, of each line that a
/// GPU with so much shared memory takes.
std::vector<Sm80ForwardConfig> sm80_forward_configs(int shared_bytes_per_sm);

/// The choice in words, a line each.
std::vector<std::string> explain_forward(const CallFacts& facts, const Sm80ForwardConfig& config);

}  // namespace tandem
