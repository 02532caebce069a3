// How widely each query spreads its attention.
#pragma once

#include <vector>

#include "problem/problem.hpp"

namespace tandem::cli {

/// Entropy of every query's attention weights in nats, (batch, heads_q, rows_q). From the scores and the
/// forward pass's LSE alone, the weights being p = exp(s - lse): H = -sum p log p = sum p (lse - s). 0 where
/// a query sees no key. For problems without varlen packing, softcap or sink; problem.lse must have been
/// computed.
std::vector<double> attention_entropy(const Problem& problem);

}  // namespace tandem::cli
