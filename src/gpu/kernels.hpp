// Where compiled kernels come from: memory, the set shipped with the library, the disk, the compiler, in that
// order.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "gpu/cache.hpp"

namespace tandem::gpu {

/// Where a kernel was found; for explain and tests.
enum class Origin { memory, shipped, disk, compiled };

struct FoundKernel {
  std::shared_ptr<const CompiledKernel> kernel;
  Origin origin = Origin::compiled;
};

/// The kernel of that name. Several threads that ask for one kernel at once wait for one compilation. Throws
/// what compiler() and compile() throw, and only if neither the shipped set nor the disk has it.
FoundKernel find_kernel(const KernelName& name);

/// Number of kernels shipped with the library: 0 if it was built without NVRTC, or its sources have changed
/// since.
std::size_t shipped_kernels();

/// The shipped set as bytes, made by tools/ship_kernels and linked in: the sources' digest (8 bytes), then
/// entries, each preceded by its length (8 bytes).
std::span<const char> shipped_archive();

/// The key of a kernel in the shipped set, which needs no compiler.
std::string shipped_key(const KernelName& name);

}  // namespace tandem::gpu
