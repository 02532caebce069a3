// Where compiled kernels come from: memory, the set shipped with the library, the disk, the compiler, in that
// order. Where nothing compiles for the architecture, its place takes PTX of portable_architecture.
#pragma once

#include <memory>
#include <string>

#include "gpu/cache.hpp"

namespace tandem::gpu {

/// Where a kernel was found; for explain and tests.
enum class Origin { memory, shipped, portable, disk, compiled };

struct FoundKernel {
  std::shared_ptr<const CompiledKernel> kernel;
  Origin origin = Origin::compiled;
};

/// The kernel of that name. Several threads that ask for one kernel at once wait for one compilation. Throws
/// what compiler() and compile() throw, and only if neither the shipped set nor the disk has it. For an
/// architecture that nothing compiles for it is PTX, of the shipped set's portable part, or from the disk or
/// a compiler that is older than the architecture.
FoundKernel find_kernel(const KernelName& name);

/// Drops a kernel from memory, whoever asks for it next finds it on the disk.
void forget_kernel(const KernelName& name);

/// Why kernels for an architecture come as PTX, which its driver compiles: there is no compiler, but a
/// shipped set, or one that does not know the architecture. Empty where none do.
std::string why_portable(const std::string& architecture);

}  // namespace tandem::gpu
