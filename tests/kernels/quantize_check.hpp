// What the quantiser must leave in its scratch memory: the CPU quantiser's quantized values, scales and means
// bit for bit, where quantized_layout.hpp puts them. For the emulator and for a GPU.
#pragma once

#include "harness/call.hpp"
#include "ops/quantize/launch.hpp"

namespace tandem::kernel_tests {

/// Two batch entries of two KV heads, rows that fill no block.
harness::Case quantize_case(DType dtype, std::int64_t head_dim_qk, std::int64_t head_dim_v);
/// Packed sequences of all kinds: empty ones, ones that fill a block, and rows that belong to none.
void make_varlen(harness::Case& c);
/// Packed sequences of 16 to 17 rows in the mean, so that several heads share a unit, whose number is no
/// multiple of the heads that it has room for; some longer ones among them.
void make_short(harness::Case& c);
/// Rows that no 16-byte load fits.
void make_unaligned(harness::Case& c);
/// Infinities, NaN, zeros, and values beyond the scale's reciprocal, in two batch entries of 150 rows or
/// more.
void set_no_numbers(harness::Call& call);

/// `params` as make_quantize_params has them for memory that the host reads. Fails the test at the first
/// difference.
void check_quantized(const harness::Call& call, const Recipe& recipe, const QuantizeParams& params);

}  // namespace tandem::kernel_tests
