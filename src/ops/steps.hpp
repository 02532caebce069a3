// From a problem and the Configs chosen for it to the steps of a call: which kernels are launched, on what
// grid, after what, and where in the workspace they work. Pure: needs no driver.
#pragma once

#include "gpu/steps.hpp"

namespace tandem {

// Each takes `steps` with the problem that the kernels see, recipe and multiprocessors, and adds the rest. A
// problem without anything to do has no steps and no workspace.

/// By any of the kernels that gpu::visit_forward knows.
void add_forward(gpu::Steps& steps, const gpu::KernelConfig& config);

/// Before add_forward: q, of which steps.problem says the dtype that its e4m3 values become, `asked` that
/// they are e4m3. Where k has a scale by (batch, KV head) as well, steps.problem.q_scale becomes the product.
void add_widened_queries(gpu::Steps& steps, const Problem& asked);

/// The copies of k and v that dequantize writes come first in the workspace. `problem` has their quantized
/// values, and steps.problem is what dequantized() makes of it.
void add_dequantize(gpu::Steps& steps, const Problem& problem, const QuantizeConfig& config);

/// `quantizer` makes the quantized values, by `add_quantizer`.
void add_eight_bit(gpu::Steps& steps, const EightBitConfig& config, const QuantizeConfig& quantizer);

void add_backward(gpu::Steps& steps, const gpu::KernelConfig& config);

/// Gradients by products of 8 bits, of what `quantizer` makes.
void add_eight_bit_backward(gpu::Steps& steps, const EightBitBackwardConfig& config,
                            const QuantizeConfig& quantizer);

/// Quantized values and scales of q, k and v, in workspace that quantized_workspace has: found, or arranged
/// where the caller has them. Whether the step after it may start while the last one ends.
bool add_quantizer(gpu::Steps& steps, const QuantizeConfig& config);

/// The steps of a call to tandem::quantize.
gpu::QuantizeSteps quantize_steps(const QuantizeProblem& problem, const QuantizeConfig& config,
                                  int multiprocessors);

}  // namespace tandem
