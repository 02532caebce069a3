// From a Problem and a Recipe to what the quantiser is launched with, and to where its quantized values and
// scales lie. Pure: needs no driver, so that the emulator's tests use it too.
#pragma once

#include <cstdint>

#include "gpu/kernel_spec.hpp"
#include "gpu/workspace.hpp"
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
/// The items of the kernels that quantise, or arrange quantized values of the caller's.
QuantizeItems quantize_items(const Problem& problem);
/// The items of the kernel that dequantises k and v.
QuantizeItems dequantize_items(const Problem& problem);

/// `memory` is that of `workspace`, which begins with quantized_workspace.
QuantizeParams make_quantize_params(const Problem& problem, const Recipe& recipe, const Workspace& workspace,
                                    char* memory);

/// Parameters of the kernel that arranges the values of a quantized problem, with its scales.
ArrangeParams make_arrange_params(const Problem& problem, const QuantizeParams& params);

/// What `dequantize` is launched with to fill the 16-bit K and V of dequantized(problem).
ArrangeParams make_dequantize_params(const Problem& problem, const Problem& dequantized);

void fill_dequantize(StepParams& call, const Step& step);
void fill_quantize(StepParams& call, const Step& step);
void fill_arrange_quantized(StepParams& call, const Step& step);
BlockShape mean_block(const KernelConfig& config);
BlockShape quantize_block(const KernelConfig& config);
BlockShape arrange_block(const KernelConfig& config);

namespace kernels {
inline constexpr KernelSpec dequantize{
    .header = "ops/quantize/common/dequantize.cuh",
    .entry = "dequantize",
    .block = [](const KernelConfig&) { return BlockShape{.threads = quantize_threads}; },
    .params = fill_dequantize};
inline constexpr KernelSpec mean_of_keys{.header = "ops/quantize/common/mean_of_keys.cuh",
                                         .entry = "mean_of_keys",
                                         .block = mean_block,
                                         .params = fill_quantize};
inline constexpr KernelSpec largest_of_groups{.header = "ops/quantize/common/quantize.cuh",
                                              .entry = "largest_of_groups",
                                              .block = quantize_block,
                                              .params = fill_quantize};
inline constexpr KernelSpec quantize{.header = "ops/quantize/common/quantize.cuh",
                                     .entry = "quantize",
                                     .block = quantize_block,
                                     .params = fill_quantize};
inline constexpr KernelSpec arrange_quantized{.header = "ops/quantize/common/arrange_quantized.cuh",
                                              .entry = "arrange_quantized",
                                              .block = arrange_block,
                                              .params = fill_arrange_quantized};
}  // namespace kernels

}  // namespace tandem::gpu
