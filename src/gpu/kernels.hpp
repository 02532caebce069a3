// Where compiled kernels come from: memory, the set shipped with the library, the disk, the compiler, in that
// order.
#pragma once

#include <memory>
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

}  // namespace tandem::gpu
