// Scratch memory of the two passes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/cpu.hpp"

namespace tandem::cpu {

/// Bytes that each pass wants from its caller, alignment slack included.
std::size_t forward_workspace_bytes(const Problem& problem, const Config& config);
std::size_t backward_workspace_bytes(const Problem& problem, const Config& config);

/// A cache line, and the widest register.
constexpr std::size_t scratch_alignment = 64;

/// The first aligned byte of a workspace.
inline std::byte* align_scratch(std::byte* workspace) {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace);
  return workspace + ((address + scratch_alignment - 1) / scratch_alignment * scratch_alignment - address);
}

}  // namespace tandem::cpu
