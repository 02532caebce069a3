// Swizzles, on absolute shared-memory addresses as the hardware computes them.
#pragma once

#include <cstdint>

#include "config/tensor_map_spec.hpp"

namespace tandem::emulator {

constexpr std::uint32_t swizzle_span(Swizzle s) {
  return static_cast<std::uint32_t>(bytes_of(s));
}

/// Bytes after which the pattern repeats: eight rows. Tiles start at a multiple of it.
constexpr std::uint32_t swizzle_pattern(Swizzle s) {
  return 8 * swizzle_span(s);
}

/// b128: the unit index (address bits 4 to 6) ^= bits 7 to 9; b64: bits 4, 5 ^= bits 7, 8; b32: bit 4 ^=
/// bit 7.
constexpr std::uint32_t swizzled(std::uint32_t address, Swizzle s) {
  const std::uint32_t unit_mask = swizzle_span(s) / 16 - 1;
  return address ^ ((address >> 7 & unit_mask) << 4);
}

}  // namespace tandem::emulator
