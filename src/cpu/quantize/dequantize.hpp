// 8-bit K and V with scales, to the dtype of the queries.
#pragma once

#include "problem/mixed.hpp"

namespace tandem::cpu {

/// Fills K and V of `to`, which dequantized(problem) gives, in the rows that take part.
void dequantize(const Problem& problem, const Problem& to, int threads);

}  // namespace tandem::cpu
