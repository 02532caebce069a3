// The 8-bit backward kernels' Config for a problem.
#pragma once

#include <string>
#include <vector>

#include "ops/eight_bit_backward/config.hpp"
#include "plan/facts.hpp"

namespace tandem {

/// The Config for a backward call with a backward_precision, on Hopper.
EightBitBackwardConfig choose_eight_bit_backward_config(const CallFacts& facts);
/// That of the kernels that quantise for it.
QuantizeConfig choose_gradient_quantizer(const CallFacts& facts, const Recipe& recipe);

/// The one for tensors whose rows allow vectors.
QuantizeConfig gradient_quantizer_of(const EightBitBackwardConfig& config);

/// Why a Config cannot run; empty if it can.
std::string eight_bit_backward_objection(const EightBitBackwardConfig& config);

/// Bytes of local memory that ptxas may give the main kernel: of heads of 128 the producer's warps have 24
/// registers a thread, and consumers store words of the tile once a tile. No step of the loop stores any.
int eight_bit_backward_local_bytes_allowed(const EightBitBackwardConfig& config);

/// Configs that are compiled into the library: of heads of 128 in bf16, full and causal.
std::vector<EightBitBackwardConfig> shipped_eight_bit_backward_configs();

/// The choice in words, a line each.
std::vector<std::string> explain_eight_bit_backward(const CallFacts& facts,
                                                    const EightBitBackwardConfig& config);

}  // namespace tandem
