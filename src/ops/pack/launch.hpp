// Copies of tensors that TMA cannot read. Pure: needs no driver.
#pragma once

#include "gpu/kernel_spec.hpp"
#include "gpu/param_fields.hpp"
#include "problem/mixed.hpp"

namespace tandem::gpu {

/// The copy's strides: rows of whole groups of 8 elements, heads next to one another.
Operand packed_operand(const LoadedTensor& tensor);

std::int64_t packed_bytes(const LoadedTensor& tensor);

/// Thread blocks of the launch on a device of so many SMs.
std::int64_t pack_grid(const LoadedTensor& tensor, int multiprocessors);

/// The kernel that can read the tensor. One of e4m3 becomes `element`.
PackConfig pack_config(const LoadedTensor& tensor, Element element = Element::bf16);

/// `target` has packed_bytes.
PackParams make_pack_params(const LoadedTensor& tensor, void* target);

/// Whether q and k have a scale each by (batch, KV head), of which kernels read the product.
inline bool multiplies_scales(const Scales& q_scale, const Scales& k_scale) {
  return q_scale.data != nullptr && k_scale.data != nullptr && !is_by_row(k_scale);
}

/// Parameters of the kernel that widens q from e4m3 to the 16 bits that `problem` has it in. `product` has
/// (batch, heads_kv) numbers where multiplies_scales.
WidenParams make_widen_params(const Problem& problem, const LoadedTensor& q, const Scales& q_scale,
                              void* target, float* product);

void fill_pack(StepParams& call, const Step& step);

namespace kernels {
inline constexpr KernelSpec pack{
    .header = "ops/pack/common/pack.cuh",
    .entry = "pack",
    .block = [](const KernelConfig&) { return BlockShape{.threads = pack_threads}; },
    .params = fill_pack};
}

}  // namespace tandem::gpu
