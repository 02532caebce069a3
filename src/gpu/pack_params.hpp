// Copies of tensors that TMA cannot read. Pure: needs no driver.
#pragma once

#include "gpu/param_fields.hpp"
#include "kernels/config/pack.hpp"

namespace tandem::gpu {

/// The copy's strides: rows of whole groups of 8 elements, heads next to one another.
Operand packed_operand(const LoadedTensor& tensor);

std::int64_t packed_bytes(const LoadedTensor& tensor);

/// Thread blocks of the launch on a device of so many SMs.
std::int64_t pack_grid(const LoadedTensor& tensor, int multiprocessors);

/// The kernel that can read the tensor.
PackConfig pack_config(const LoadedTensor& tensor);

/// `target` has packed_bytes.
PackParams make_pack_params(const LoadedTensor& tensor, void* target);

}  // namespace tandem::gpu
