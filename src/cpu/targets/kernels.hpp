// The kernels of forward calls, caches and quantized values of each instruction set.
#pragma once

#include "cpu/cache/rows.hpp"
#include "cpu/cpu.hpp"
#include "cpu/eight_bit/tile.hpp"
#include "cpu/forward/tile.hpp"

namespace tandem::cpu {

/// `target` is available.
const ForwardKernel& forward_kernel(Target target);
const ShortKernel& short_kernel(Target target);
const QuantizeKernel& quantize_kernel(Target target);
const EightBitKernel& eight_bit_kernel(Target target);
const CacheKernel& cache_kernel(Target target);

}  // namespace tandem::cpu
