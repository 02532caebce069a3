// The 8-bit forward kernel's Config for a problem: a table of tiles.
#pragma once

#include <string>
#include <vector>

#include "api/problem.hpp"
#include "kernels/quantized_config.hpp"

namespace tandem {

/// A tile, for heads of at most these dimensions.
struct QuantizedTileLine {
  int head_dim_qk, head_dim_v;
  bool masked;  ///< causal or a window
  int block_m, stages, q_stages, parts;
  bool overlap, pingpong, dynamic;
  const char* why;
};

/// The choice for a problem with a precision, on any GPU that is_supported.
QuantizedConfig choose_quantized_config(const Problem& problem, const Recipe& recipe);

/// Why a Config cannot run; empty if it can.
std::string quantized_objection(const QuantizedConfig& config);

/// Bytes of local memory that the kernel of a Config may take. In narrower parts head dimension 256 takes
/// none, and is a tenth slower; neither does head dimension 64 without ping-pong, which is 3 % slower. Ragged
/// causal heads of 128 keep two words of a tile there.
int quantized_local_bytes_allowed(const QuantizedConfig& config);

/// Configs that are compiled into the library: every precision at the usual models' head dimensions, in bf16.
std::vector<QuantizedConfig> shipped_quantized_configs();

/// The choice in words, a line each.
std::vector<std::string> explain_quantized(const Problem& problem, const Recipe& recipe,
                                           const QuantizedConfig& config);

}  // namespace tandem
