// From a Problem and its codes and scales to what the 8-bit forward kernel is launched with. Pure: needs no
// driver, so that the emulator's tests use it too.
#pragma once

#include "gpu/forward_params.hpp"
#include "kernels/config/eight_bit.hpp"
#include "kernels/config/quantize.hpp"

namespace tandem::gpu {

/// Codes and scales as quantized_layout.hpp has them; v and v_scales are null where V stays in 16 bits, shift
/// where no mean was removed.
struct QuantizedOperands {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const float* q_scales = nullptr;
  const float* k_scales = nullptr;
  const float* v_scales = nullptr;
  const float* shift = nullptr;
};

/// Whether TMA can read q, k and v, codes of the caller's, where they are.
bool can_read_codes(const Problem& problem, const EightBitConfig& config);

/// What a kernel with transpose_v is launched with: the caller's codes and scales, which can_read_codes.
EightBitParams make_brought_params(const Problem& problem, const EightBitConfig& config,
                                   EncodeTensorMap encode, int processors, unsigned int* tile_counter);

/// Those that the quantiser writes.
QuantizedOperands operands_of(const QuantizeParams& params);

/// `tile_counter`: 0 before the launch (dynamic Configs).
EightBitParams make_eight_bit_params(const Problem& problem, const EightBitConfig& config,
                                     const QuantizedOperands& operands, EncodeTensorMap encode,
                                     int processors, unsigned int* tile_counter);

}  // namespace tandem::gpu
