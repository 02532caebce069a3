// Kernels loaded into a device's context, and their launch.
#pragma once

#include "gpu/device.hpp"
#include "gpu/function_source.hpp"
#include "gpu/kernel_name.hpp"

namespace tandem::gpu {

/// A kernel in the primary context of a device, with its dynamic shared memory allowed. Lives as long as the
/// process: unloading at exit would race with the driver's own end.
struct LoadedKernel {
  abi::Function function = nullptr;
  int shared_bytes = 0;
  abi::Module module = nullptr;
  bool portable = false;  ///< compiled by the driver from PTX
};

/// Finds a kernel, loads it into the device's primary context and allows it `shared_bytes` of dynamic shared
/// memory: anew at each call.
LoadedKernel load_kernel(int device, const KernelName& name, int shared_bytes);

/// The kernel of `config` on a device: found, loaded and configured at the first call (milliseconds, seconds
/// if it must be compiled), from a table from then on, which costs a hash of the Config's fields and a shared
/// lock. `functions` are those whose digest the Config has.
LoadedKernel loaded_kernel(int device, Kernel kernel, const KernelConfig& config,
                           const CallFunctions& functions = {});

struct LaunchShape {
  unsigned int grid = 1;
  unsigned int threads = 128;
  abi::Stream stream = nullptr;
  unsigned int cluster = 1;   ///< blocks of a cluster
  bool programmatic = false;  ///< may start while the grid before it in the stream ends (griddepcontrol)
  bool resident = false;      ///< starts when there is room for all of its CTAs, which wait for each other
};

/// Launches on the current context. `params` is the kernel's one parameter. A portable kernel is never
/// programmatic: in its instructions it cannot wait for the grid before it.
void launch(const LoadedKernel& kernel, const LaunchShape& shape, const void* params);

}  // namespace tandem::gpu
