// How a Config names its kernel: as the C++20 expression that NVRTC instantiates.
#pragma once

#include <cstddef>
#include <string>

#include "gpu/compiler.hpp"
#include "kernels/config/backward.hpp"
#include "kernels/config/eight_bit.hpp"
#include "kernels/config/forward.hpp"
#include "kernels/config/pack.hpp"
#include "kernels/config/quantize.hpp"

namespace tandem::gpu {

/// "tandem::ForwardConfig{.element = tandem::Element::bf16, .head_dim_qk = 128, ...}": valid C++20 that gives
/// `config` back.
std::string expression_of(const ForwardConfig& config);
std::string expression_of(const EightBitConfig& config);
std::string expression_of(const BackwardConfig& config);
std::string expression_of(const PackConfig& config);
std::string expression_of(const QuantizeConfig& config);

/// The kernels of one backward call, in this order.
enum class BackwardKernel : int { preprocess, main, convert, sink };

/// The quantiser's kernels, in this order.
enum class QuantizeKernel : int { mean, largest, codes, arrange, dequantize };
constexpr std::size_t quantize_kernels_count = 5;

/// The kernel that a Config specialises.
KernelName kernel_name(const ForwardConfig& config);
KernelName kernel_name(const EightBitConfig& config);
KernelName kernel_name(const BackwardConfig& config, BackwardKernel which);
KernelName kernel_name(const PackConfig& config);
KernelName kernel_name(const QuantizeConfig& config, QuantizeKernel which);

}  // namespace tandem::gpu
