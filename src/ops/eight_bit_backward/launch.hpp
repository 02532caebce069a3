// From a Problem and a Config to what the kernels of the 8-bit backward pass are launched with. Pure: needs
// no driver, so that the emulator's tests use it too.
#pragma once

#include "ops/backward/launch.hpp"
#include "ops/eight_bit_backward/config.hpp"
#include "ops/quantize/launch.hpp"

namespace tandem::gpu {

/// Maps of the rows of s8 values, in the workspace.
LoadedMaps eight_bit_backward_maps(const Problem& problem, const EightBitBackwardConfig& config);

/// What the kernels of `config` work in, with counters that are 0 before the first launch.
Workspace eight_bit_backward_workspace(const Problem& problem, const EightBitBackwardConfig& config,
                                       const Recipe& recipe);

/// Work items of the quantiser, of one head each.
QuantizeItems gradient_items(const Problem& problem);

/// What all kernels of the call are launched with.
EightBitBackwardParams make_eight_bit_backward_params(const Problem& problem,
                                                      const EightBitBackwardConfig& config,
                                                      const Recipe& recipe, const LoadedMaps& maps,
                                                      EncodeTensorMap encode, const Workspace& workspace,
                                                      char* memory);

/// The Configs of the main kernel and of the one that writes dq: what a kernel does not read at its default,
/// so that one compiled kernel serves several.
EightBitBackwardConfig eight_bit_main_config(EightBitBackwardConfig config);
EightBitBackwardConfig eight_bit_convert_config(const EightBitBackwardConfig& config);

void fill_eight_bit_backward(StepParams& call, const Step& step);
void fill_mean_of_gradients(StepParams& call, const Step& step);
BlockShape gradient_keys_block(const KernelConfig& config);
BlockShape gradient_queries_block(const KernelConfig& config);
BlockShape eight_bit_backward_block(const KernelConfig& config);
BlockShape eight_bit_convert_block(const KernelConfig& config);

namespace kernels {
/// The kernel mean_of_keys, among these.
inline constexpr KernelSpec mean_of_gradients{.header = "ops/quantize/common/mean_of_keys.cuh",
                                              .entry = "mean_of_keys",
                                              .block = mean_block,
                                              .params = fill_mean_of_gradients};
inline constexpr KernelSpec quantize_keys{.header = "ops/eight_bit_backward/common/quantize_keys.cuh",
                                          .entry = "quantize_keys",
                                          .block = gradient_keys_block,
                                          .params = fill_eight_bit_backward};
inline constexpr KernelSpec quantize_queries{.header = "ops/eight_bit_backward/common/quantize_queries.cuh",
                                             .entry = "quantize_queries",
                                             .block = gradient_queries_block,
                                             .params = fill_eight_bit_backward};
inline constexpr KernelSpec eight_bit_backward{.header = "ops/eight_bit_backward/sm90/eight_bit_backward.cuh",
                                               .entry = "eight_bit_backward",
                                               .block = eight_bit_backward_block,
                                               .params = fill_eight_bit_backward};
inline constexpr KernelSpec eight_bit_convert{.header = "ops/eight_bit_backward/common/eight_bit_convert.cuh",
                                              .entry = "eight_bit_convert",
                                              .block = eight_bit_convert_block,
                                              .params = fill_eight_bit_backward};
}  // namespace kernels

}  // namespace tandem::gpu
