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

/// The bf16 numbers of the 128 codes of e4m3 without their signs.
struct E4m3Table {
  alignas(64) std::uint16_t bits[128];
};
constexpr E4m3Table e4m3_table = [] {
  E4m3Table table{};
  for (int code = 0; code < 128; ++code) {
    const float value = to_f32(e4m3{static_cast<std::uint8_t>(code)});
    table.bits[code] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  }
  return table;
}();

/// 32 elements as bf16, as they would lie in memory: two look-ups of 64 numbers, half of what widening to f32
/// and rounding take.
TANDEM_INLINE UVec bf16_of(const e4m3* p) {
  const __m512i code = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const auto table = [](int part) __attribute__((always_inline)) {
    return _mm512_load_si512(e4m3_table.bits + 32 * part);
  };
  const __m512i low = _mm512_permutex2var_epi16(table(0), code, table(1));  // looks at 6 bits of the code
  const __m512i high = _mm512_permutex2var_epi16(table(2), code, table(3));
  const __mmask32 is_high = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40));
  const __m512i magnitude = _mm512_mask_blend_epi16(is_high, low, high);
  // magnitude | (code & sign): the sign has spread into all upper bits
  return UVec{_mm512_ternarylogic_epi32(magnitude, code, _mm512_set1_epi16(-0x8000), 0xF8)};
}
TANDEM_INLINE UVec bf16_of(const s8* p) {
  return join_bf16(load(p), load(p + vec_lanes));
}
TANDEM_INLINE UVec bf16_of(const bf16* p) {
  return hn::LoadU(u32_lanes, reinterpret_cast<const std::uint32_t*>(p));
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
