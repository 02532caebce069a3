// The 8-bit forward kernel's Config for a problem: a table of tiles.
#pragma once

#include <string>
#include <vector>

#include "kernels/config/eight_bit.hpp"
#include "problem/problem.hpp"

namespace tandem {

/// A tile, for heads of at most these dimensions.
struct EightBitTileLine {
  int head_dim_qk, head_dim_v;
  bool masked;  ///< causal or a window
  int block_m, stages, q_stages, parts;
  bool overlap, pingpong, dynamic;
  const char* why;
};

/// The choice for a problem with a precision, on any GPU that is_supported.
EightBitConfig choose_eight_bit_config(const Problem& problem, const Recipe& recipe);

/// Why a Config cannot run; empty if it can.
std::string eight_bit_objection(const EightBitConfig& config);

/// Bytes of local memory that the kernel of a Config may take. In narrower parts head dimension 256 takes
/// none, and is a tenth slower; neither does head dimension 64 without ping-pong, which is 3 % slower. Varlen
/// causal heads of 128 keep two words of a tile there.
int eight_bit_local_bytes_allowed(const EightBitConfig& config);

/// Configs that are compiled into the library: every precision at the usual models' head dimensions, in bf16.
std::vector<EightBitConfig> shipped_eight_bit_configs();

/// The choice in words, a line each.
std::vector<std::string> explain_eight_bit(const Problem& problem, const Recipe& recipe,
                                           const EightBitConfig& config);

}  // namespace tandem
