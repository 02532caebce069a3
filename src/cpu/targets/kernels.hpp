// The kernels of each instruction set.
#pragma once

#include "cpu/backward/block.hpp"
#include "cpu/cache/rows.hpp"
#include "cpu/eight_bit/tile.hpp"
#include "cpu/forward/tile.hpp"
#include "cpu/targets/target.hpp"

namespace tandem::cpu {

struct Kernels {
  const ForwardKernel& forward;
  const ShortKernel& few_rows;
  const BackwardKernel& backward;
  const QuantizeKernel& quantize;
  const EightBitKernel& eight_bit;
  const CacheKernel& cache;
};

/// `target` is available.
const Kernels& kernels(Target target);

}  // namespace tandem::cpu
