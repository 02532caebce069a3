// The quantiser on a GPU: codes and scales of Q, K and V in the layout that the 8-bit attention kernel reads.
#pragma once

#include "api/problem.hpp"
#include "gpu/launch.hpp"
#include "gpu/quantize_params.hpp"

namespace tandem::gpu {

/// The kernels of a recipe, loaded; `mean` only if K's mean is removed.
struct QuantizeKernels {
  LoadedKernel mean;
  LoadedKernel codes;
};
QuantizeKernels quantize_kernels(int device, const QuantizeConfig& config);

/// Launches them on the current context. `scratch` is 256-byte aligned memory of quantized_space.
void quantize(const Problem& problem, const Recipe& recipe, const QuantizeKernels& kernels, char* scratch,
              abi::Stream stream);

}  // namespace tandem::gpu
