// tandem::quantize on a GPU: one tensor, in the caller's layout.
#pragma once

#include <cstddef>

#include "kernels/config/quantize.hpp"
#include "problem/quantize_job.hpp"

namespace tandem::gpu {

/// Launches on `stream` of the job's device and returns. What the mean and the scales of a head or a tensor
/// take on the way (linear in rows / 128) is allocated and freed in stream order. Throws Error (unsupported)
/// for f32, which has no kernel.
void quantize_tensor(const QuantizeJob& job, void* stream);

/// What it launches, pure: x takes k's place. `scratch` is 16-byte aligned memory of tensor_scratch_bytes, of
/// which the first tensor_zero_bytes are 0.
QuantizeConfig tensor_config(const QuantizeJob& job);
std::size_t tensor_zero_bytes(const QuantizeJob& job);
std::size_t tensor_scratch_bytes(const QuantizeJob& job);
QuantizeParams make_tensor_params(const QuantizeJob& job, char* scratch);

}  // namespace tandem::gpu
