// The 8-bit forward kernel's Config for a problem: a table of tiles.
#pragma once

#include <string>
#include <vector>

#include "ops/eight_bit/config.hpp"
#include "plan/facts.hpp"

namespace tandem {

/// A tile, for heads of at most these dimensions.
struct EightBitTileLine {
  int head_dim_qk, head_dim_v;
  bool masked;  ///< causal or a window
  int block_m, stages, q_stages, slices;
  bool overlap, pingpong, dynamic;
  const char* why;
};

/// The choice for a call with a precision, on Hopper.
EightBitConfig choose_eight_bit_config(const CallFacts& facts, const Recipe& recipe);

/// `config` for quantized values of the caller's that are read where they are.
EightBitConfig eight_bit_in_place(EightBitConfig config);

/// Why a Config cannot run; empty if it can.
std::string eight_bit_objection(const EightBitConfig& config);

/// Bytes of local memory that the kernel of a shipped Config, or of one in place, may take: 0 but for fp8's
/// varlen heads of 64, whose three warpgroups have 160 registers a thread, of 128 in place, where finding
/// strips takes registers, and int8's heads of 128 and 256. In narrower slices head dimension 256 takes none,
/// and is a tenth slower.
int eight_bit_local_bytes_allowed(const EightBitConfig& config);

/// Configs that are compiled into the library: every precision at the usual models' head dimensions, in bf16.
std::vector<EightBitConfig> shipped_eight_bit_configs();

/// The choice in words, a line each.
std::vector<std::string> explain_eight_bit(const Problem& problem, const Recipe& recipe,
                                           const EightBitConfig& config);

}  // namespace tandem
