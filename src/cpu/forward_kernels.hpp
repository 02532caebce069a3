// The kernels of forward calls, caches and quantized values of each instruction set.
#pragma once

#include "cpu/cache_rows.hpp"
#include "cpu/cpu.hpp"
#include "cpu/eight_bit_tile.hpp"
#include "cpu/forward_tile.hpp"

namespace tandem::cpu {

/// `target` is available.
const ForwardKernel& forward_kernel(Target target);
const ShortKernel& short_kernel(Target target);
const QuantizeKernel& quantize_kernel(Target target);
const EightBitKernel& eight_bit_kernel(Target target);
const CacheKernel& cache_kernel(Target target);

}  // namespace tandem::cpu
