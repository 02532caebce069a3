// Tensor maps, encoded by the driver.
#pragma once

#include "config/tensor_map_spec.hpp"

namespace tandem::gpu {

/// Encodes `spec` for TMA; an EncodeTensorMap. Needs no context. Throws Error (internal) for a
/// spec that breaks tma_objection's rules, runtime if the driver refuses it all the same.
TensorMap encode_tensor_map(const TensorMapSpec& spec);

}  // namespace tandem::gpu
