// The backward pass in 8 bits.
#pragma once

#include "cpu/eight_bit/forward.hpp"

namespace tandem::cpu {

/// Threads take whole KV heads, each in memory of its own.
EightBitPlan plan_eight_bit_gradients(const Problem& problem, const Config& config);
/// `problem` is that of the plan, with all addresses.
void eight_bit_gradients(const Plan& plan, const Problem& problem, std::byte* workspace, Stop* stop);

}  // namespace tandem::cpu
