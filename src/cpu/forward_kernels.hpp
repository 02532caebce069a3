// The forward kernel of each instruction set.
#pragma once

#include "cpu/cpu.hpp"
#include "cpu/forward_tile.hpp"
#include "cpu/quantized_tile.hpp"

namespace tandem::cpu {

/// `target` is available.
const ForwardKernel& forward_kernel(Target target);
const ShortKernel& short_kernel(Target target);
const QuantizeKernel& quantize_kernel(Target target);
const QuantizedKernel& quantized_kernel(Target target);

}  // namespace tandem::cpu
