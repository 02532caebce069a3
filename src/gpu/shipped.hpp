// The set of kernels shipped with the library: one archive, linked in as bytes. The sources' digest (8
// bytes), then entries as cache.hpp packs them, each preceded by its length (8 bytes).
#pragma once

#include <optional>
#include <span>
#include <string>

#include "gpu/cache.hpp"

namespace tandem::gpu {

/// The beginning of an archive for this build's sources.
std::string shipped_header();

/// Adds a kernel to an archive.
void append_shipped(std::string& archive, const KernelName& name, const CompiledKernel& kernel);

/// The archive linked into this library; empty if it was built without NVRTC. Weak, so that a test may have
/// one of its own.
std::span<const char> shipped_archive();

/// The kernel of that name in the linked archive, if it has one.
std::optional<CompiledKernel> find_shipped(const KernelName& name);

/// Number of kernels in the linked archive: 0 if there is none, or if it was made from other sources.
std::size_t shipped_kernels();

}  // namespace tandem::gpu
