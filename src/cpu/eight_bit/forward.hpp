// The forward pass in 8 bits.
#pragma once

#include "cpu/cpu.hpp"

namespace tandem::cpu {

/// Quantized values and scales of K and V, linear in seqlen: of one KV head for each thread, or of one for
/// all threads where there are fewer heads than threads; and a tile for each thread.
std::size_t eight_bit_workspace_bytes(const Problem& problem, const Config& config);

/// As config.recipe says; problem.precision is not looked at.
void eight_bit_forward(const Problem& problem, const Config& config, std::span<std::byte> workspace,
                       Stop* stop = nullptr);

}  // namespace tandem::cpu
