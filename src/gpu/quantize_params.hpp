// From a Problem and a Recipe to what the quantiser is launched with, and to where its quantized values and
// scales lie. Pure: needs no driver, so that the emulator's tests use it too.
#pragma once

#include <cstdint>

#include "gpu/workspace.hpp"
#include "kernels/config/quantize.hpp"
#include "problem/problem.hpp"

namespace tandem::gpu {

/// What the quantiser's kernels write and work in. What a recipe does without takes no room.
Workspace quantized_workspace(const Problem& problem, const Recipe& recipe);

/// Blocks of a tensor's axis times heads, `heads_per_item` of them as one: what a kernel does at a time.
struct QuantizeItems {
  int q = 0;
  int k = 0;
  int v = 0;
  int heads_per_item_q = 1;
  int heads_per_item_k = 1;

  [[nodiscard]] std::int64_t total() const { return std::int64_t{q} + k + v; }
};
/// Of the kernels that quantise, or arrange quantized values of the caller's.
QuantizeItems quantize_items(const Problem& problem, const Recipe& recipe);
/// Of the kernel that dequantises k and v.
QuantizeItems dequantize_items(const Problem& problem);

/// `memory` is that of `workspace`, which begins with quantized_workspace.
QuantizeParams make_quantize_params(const Problem& problem, const Recipe& recipe, const Workspace& workspace,
                                    char* memory);

/// Those of a quantized problem, with its scales.
ArrangeParams make_arrange_params(const Problem& problem, const QuantizeParams& params);

/// What `dequantize` is launched with to fill the 16-bit K and V of dequantized(problem).
ArrangeParams make_dequantize_params(const Problem& problem, const Problem& dequantized);

}  // namespace tandem::gpu
