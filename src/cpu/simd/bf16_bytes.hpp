// The bf16 numbers of 64 8-bit values, as two registers of bytes: two look-ups in tables of 128 bytes.
#pragma once

#include "cpu/simd/vec.hpp"

#if defined(__AVX512VBMI__)

namespace tandem::cpu::TANDEM_TARGET {

struct Bf16Bytes {
  __m512i low;
  __m512i high;
};

/// Bytes of the bf16 numbers of values 0 to 127 of a type, without signs.
struct Bf16ByteTable {
  alignas(64) std::uint8_t low[128];
  alignas(64) std::uint8_t high[128];
};
template <typename K>
constexpr Bf16ByteTable make_bf16_bytes() {
  Bf16ByteTable table{};
  for (int code = 0; code < 128; ++code) {
    const float value = to_f32(std::bit_cast<K>(static_cast<std::uint8_t>(code)));
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value) >> 16;
    table.low[code] = static_cast<std::uint8_t>(bits & 0xFFU);
    table.high[code] = static_cast<std::uint8_t>(bits >> 8);
  }
  return table;
}
template <typename K>
alignas(64) static constexpr Bf16ByteTable bf16_byte_table = make_bf16_bytes<K>();

template <typename K>
TANDEM_INLINE Bf16Bytes bf16_bytes(__m512i values) {
  const Bf16ByteTable& table = bf16_byte_table<K>;
  constexpr bool is_s8 = __is_same(K, s8);
  const __m512i code = is_s8 ? _mm512_abs_epi8(values) : values;  // look-ups leave the sign out
  const auto look_up = [&](const std::uint8_t* bytes) __attribute__((always_inline)) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), code, _mm512_load_si512(bytes + 64));
  };
  __m512i high = look_up(table.high);
  // -128 has no magnitude in 7 bits: its bf16 is 0xC300, and the table has found 0.
  if constexpr (is_s8) {
    high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(code), _mm512_set1_epi8(0x43));
  }
  // high | (values & sign)
  return {look_up(table.low), _mm512_ternarylogic_epi32(high, values, _mm512_set1_epi8(-0x80), 0xF8)};
}

}  // namespace tandem::cpu::TANDEM_TARGET

#endif
