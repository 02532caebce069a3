// The problem that a kernel sees: which masks it needs, and heads as rows where nothing tells them apart.
#pragma once

#include "problem/problem.hpp"

namespace tandem {

/// Whether a bound of the window, or lengths by sequence, concern any query of the problem: a bound that not
/// even the first query (on the right) or the last (on the left) feels needs no mask.
bool needs_right_mask(const Problem& problem);
bool needs_left_mask(const Problem& problem);
bool has_lengths(const Problem& problem);

/// Makes query heads rows, where there is one query a sequence and no mask or sink tells heads from rows: a
/// step of generation then reads the keys that heads share once, not once a head. Leaves other problems as
/// they are.
void fold_heads_into_rows(Problem& problem);

}  // namespace tandem
