// Calls whose q, k and v are 8-bit codes with scales, as callers of quantize have them.
#pragma once

#include "call.hpp"
#include "tandem/quantize.hpp"

namespace tandem::harness {

/// Puts codes (e4m3 or s8) and their scales in place of a 16-bit call's q, k and v. The precision that takes
/// them is set. Granularity block is not for packed tensors.
void bring_codes(Call& call, DType codes, Granularity granularity);

/// The same of k and v alone: q stays as it is, and the precision exact.
void bring_mixed_codes(Call& call, DType codes, Granularity granularity);

/// What a mixed call stands for: k and v in q's dtype, each element code * scale in f32, rounded once more.
Call dequantized(const Call& mixed);

}  // namespace tandem::harness
