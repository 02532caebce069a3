// 8-bit K and V with scales, to the dtype of the queries.
#pragma once

#include "problem/mixed.hpp"

namespace tandem::cpu {

/// Fills K and V of dequantized(problem, memory), in the rows that take part.
void dequantize(const Problem& problem, const Problem& dequantized, int threads);

}  // namespace tandem::cpu
