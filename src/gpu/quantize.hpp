// The quantiser on a GPU: codes and scales of Q, K and V in the layout that the 8-bit attention kernel reads.
#pragma once

#include "gpu/launch.hpp"
#include "gpu/quantize_params.hpp"
#include "problem/problem.hpp"

namespace tandem::gpu {

/// The kernels of a Config, loaded; those that it has no use for are empty.
struct QuantizeKernels {
  QuantizeConfig config;
  LoadedKernel mean;     ///< if K's mean is removed
  LoadedKernel largest;  ///< if K's scales are of groups larger than a block
  LoadedKernel codes;
};
QuantizeKernels quantize_kernels(int device, const QuantizeConfig& config);
/// The one that arranges the codes of a problem of codes, as `codes`.
QuantizeKernels arrange_kernels(int device, const QuantizeConfig& config);

/// Launches them on the current context, one after the other.
void launch_quantizer(const QuantizeKernels& kernels, const QuantizeParams& params, int device,
                      abi::Stream stream);

/// Codes and scales of a problem, found or, where the caller brings them, arranged, on the current context.
/// Counters must be 0.
void quantize(const Problem& problem, const QuantizeKernels& kernels, const QuantizeParams& params,
              abi::Stream stream);

/// Sets the counters in scratch memory of quantized_space to 0.
void clear_counters(const QuantizedSpace& space, abi::DevicePointer scratch, abi::Stream stream);

}  // namespace tandem::gpu
