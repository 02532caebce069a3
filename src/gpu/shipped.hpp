// The set of kernels shipped with the library: one archive, linked in as bytes. Entries as cache.hpp packs
// them, each preceded by its length (8 bytes), with a digest of the kernel's sources in its key.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "gpu/cache.hpp"

namespace tandem::gpu {

/// Adds a kernel to an archive.
void append_shipped(std::string& archive, const KernelName& name, const CompiledKernel& kernel);

/// The archive linked into this library; empty if it was built without NVRTC. Weak, so that a test may have
/// one of its own.
std::span<const char> shipped_archive();

/// The kernel of that name in the linked archive, if it has one.
std::optional<CompiledKernel> find_shipped(const KernelName& name);

/// Number of kernels in the linked archive: 0 if there is none.
std::size_t shipped_kernels();

}  // namespace tandem::gpu
