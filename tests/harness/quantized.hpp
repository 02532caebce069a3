// Calls whose q, k and v are 8-bit values with scales, as callers of quantize have them.
#pragma once

#include "call.hpp"
#include "tandem/quantize.hpp"

namespace tandem::harness {

/// Puts quantized values (e4m3 or s8) and their scales in place of a 16-bit call's q, k and v. The precision
/// that takes them is set. Granularity block is not for packed tensors.
void quantize_inputs(Call& call, DType dtype, Granularity granularity);

/// The same of k and v alone: q stays as it is, and the precision exact.
void quantize_keys_and_values(Call& call, DType dtype, Granularity granularity);

/// What a mixed call stands for: k and v in q's dtype, each element quantized value * scale in f32, rounded
/// once more.
Call dequantized(const Call& mixed);

}  // namespace tandem::harness
