// The quantiser on the CPU.
#pragma once

#include "api/problem.hpp"
#include "cpu/cpu.hpp"
#include "cpu/quantized_tile.hpp"

namespace tandem::cpu {

/// What quantize is about once its arguments have been checked. Operands as in Problem; scales by (batch,
/// block or row, head), mean by (batch, -, head) with contiguous channels.
struct QuantizeJob {
  std::int64_t batch = 0;
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  Operand x, codes, scales, mean;
  ScaleGroup group = ScaleGroup::head;
  bool rotate = false;
};

/// threads 0: OMP_NUM_THREADS, or every core.
void quantize(const QuantizeJob& job, Target target, int threads);

}  // namespace tandem::cpu
