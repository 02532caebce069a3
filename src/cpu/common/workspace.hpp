// Scratch memory: where its pieces lie.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::cpu {

/// A cache line, and the widest register.
constexpr std::size_t scratch_alignment = 64;

[[gnu::always_inline]] inline constexpr std::size_t whole_lines(std::size_t bytes) {
  return (bytes + scratch_alignment - 1) / scratch_alignment * scratch_alignment;
}

/// The first aligned byte of a workspace.
inline std::byte* align_scratch(std::byte* workspace) {
  return workspace + (whole_lines(reinterpret_cast<std::uintptr_t>(workspace)) -
                      reinterpret_cast<std::uintptr_t>(workspace));
}

}  // namespace tandem::cpu
