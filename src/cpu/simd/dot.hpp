// The bf16 dot product, where the instruction set has it.
#pragma once

#include "cpu/simd/vec.hpp"

namespace tandem::cpu::TANDEM_TARGET {

#if defined(__AVX512BF16__)
constexpr bool has_bf16_dot = true;

/// acc[i] + a[2i] * b[2i] + a[2i+1] * b[2i+1]: lanes of `a` and `b` hold two bf16 each, the first in the
/// lower half. Accumulates in f32; subnormal inputs count as 0.
TANDEM_INLINE Vec dot_bf16(Vec acc, UVec a, UVec b) {
  return Vec{_mm512_dpbf16_ps(acc.raw, (__m512bh)a.raw, (__m512bh)b.raw)};
}

/// bf16(first), then bf16(second), lane after lane: as they lie in memory.
TANDEM_INLINE UVec join_bf16(Vec first, Vec second) {
  return UVec{(__m512i)_mm512_cvtne2ps_pbh(second.raw, first.raw)};
}

/// Lane i holds bf16(first[i]) in its lower half and bf16(second[i]) in its upper half.
TANDEM_INLINE UVec pair_bf16(Vec first, Vec second) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second.raw, first.raw);
  alignas(64) static constexpr std::uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                          21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                          11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return UVec{_mm512_permutexvar_epi16(_mm512_load_si512(order), both)};
}
#else
constexpr bool has_bf16_dot = false;

// Declared, so that code discarded by `if constexpr (has_bf16_dot ...)` compiles; never called.
Vec dot_bf16(Vec acc, UVec a, UVec b);
UVec join_bf16(Vec first, Vec second);
UVec pair_bf16(Vec first, Vec second);
#endif

}  // namespace tandem::cpu::TANDEM_TARGET
