// The portable part of the shipped set: the usual kernels of the family sm80 in PTX, for a GPU whose
// architecture nothing on the machine compiles for. One Config serves every mask, any lengths and head
// dimensions up to its own, so that the set is small.
#pragma once

#include <string>
#include <vector>

#include "gpu/kernel_spec.hpp"
#include "plan/facts.hpp"

namespace tandem {

/// Shared memory of an SM that the set's tiles are for: the least that any GPU from Ampere on has.
constexpr int portable_shared_bytes_per_sm = 100 * 1024;

/// The set's Config for a call of 16 bits, with head dimensions that the family sm80 has a tile for. What
/// no Config of the set has (softcap, a scale below 0, splits of a fixed size, ...) it has as well.
Sm80ForwardConfig portable_forward_config(const CallFacts& facts);
Sm80BackwardConfig portable_backward_config(const CallFacts& facts);

/// The main kernels of the set: bf16 and f16, heads of up to 64, 128 and 256 dimensions as the tables have
/// tiles. Forward of rows and of pages: of many queries, and of few, whose key blocks CTAs share. Backward in
/// any order.
std::vector<Sm80ForwardConfig> portable_forward_configs();
std::vector<Sm80BackwardConfig> portable_backward_configs();

/// Every kernel of the set, those beside the main ones too: combine, preprocess and convert, pack, append to
/// caches of 16 bits, merge.
std::vector<gpu::KernelName> portable_kernels();

/// The choice in words, a line each.
std::vector<std::string> explain_portable(const CallFacts& facts, const gpu::KernelConfig& config);

}  // namespace tandem
