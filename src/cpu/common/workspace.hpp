// Scratch memory of the two passes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/cpu.hpp"

namespace tandem::cpu {

/// Bytes that each pass wants from its caller, alignment slack included.
std::size_t forward_workspace_bytes(const Problem& problem, const Config& config);
/// threads * tile, with tile about 4 * (block_q * 7 + block_k * 3) * head_dim + 8 * block_q * block_k; for
/// f16 and bf16 also f32 sums of dk and dv, 4 * rows_k * (head_dim_qk + head_dim_v), for each (batch, kv
/// head) at work at the same time, of which there are at most min(batch * heads_kv, 3 * threads); where keys
/// are packed, and rows_k is that of all sequences, at most min(heads_kv, 3 * threads) times.
std::size_t backward_workspace_bytes(const Problem& problem, const Config& config);

/// A cache line, and the widest register.
constexpr std::size_t scratch_alignment = 64;

/// The first aligned byte of a workspace.
inline std::byte* align_scratch(std::byte* workspace) {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace);
  return workspace + ((address + scratch_alignment - 1) / scratch_alignment * scratch_alignment - address);
}

}  // namespace tandem::cpu
