// What of a mask function is a window. Kernels know windows: they have no functions to evaluate, skip the
// blocks outside and need no compiler, so that `k <= q` is to cost what causal=true costs.
#pragma once

#include <cstdint>
#include <optional>

#include "problem/problem.hpp"

namespace tandem {

/// A mask function as bounds on key - query and the function of what they leave open.
struct MaskWindow {
  /// key - query <= right, query - key <= left.
  struct Bounds {
    std::optional<std::int64_t> left, right;
  };
  Bounds from_start;  ///< between positions as functions count them
  Bounds from_end;    ///< between key - seqlen_k and query - seqlen_q, as a Problem's window has them
  /// No operand of the comparisons is more than this beyond twice the queries and keys: integers of 32 bits,
  /// which wrap, are then what they look like.
  std::int64_t reach = 0;
  std::optional<Function> rest;  ///< the other conditions; none: the bounds are all
};

/// Takes the bounds of the mask function into the problem's window, and leaves the problem the rest of it;
/// all bounds, or none where they are no window of these lengths, as `k < q` is none of equal ones.
void fold_mask_window(Problem& problem);

}  // namespace tandem
