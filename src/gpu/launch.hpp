// Kernels loaded into a device's context, and their launch.
#pragma once

#include <atomic>
#include <memory>

#include "gpu/device.hpp"
#include "gpu/function_source.hpp"
#include "gpu/kernel_spec.hpp"

namespace tandem::gpu {

/// What is known of a kernel that may be unloaded: one with functions, of which there may be any number.
struct KernelUse {
  KernelName name;
  std::atomic<unsigned long long> last = 0;  ///< when it was asked for, counted in such questions
  std::atomic<bool> captured = false;        ///< a graph has it, and may launch it at any time
};

/// A kernel in the primary context of a device, with its dynamic shared memory allowed. One without functions
/// lives as long as the process: unloading at exit would race with the driver's own end.
struct LoadedKernel {
  abi::Function function = nullptr;
  int shared_bytes = 0;
  abi::Module module = nullptr;
  bool portable = false;                     ///< compiled by the driver from PTX
  std::shared_ptr<KernelUse> use = nullptr;  ///< null: never unloaded. Whoever has a copy keeps it loaded
};

/// Finds a kernel, loads it into the device's primary context and allows it `shared_bytes` of dynamic shared
/// memory: anew at each call.
LoadedKernel load_kernel(int device, const KernelName& name, int shared_bytes);

/// The kernel of `config` on a device: found, loaded and configured at the first call (milliseconds, seconds
/// if it must be compiled), from a table from then on, which costs a hash of the Config's fields and a shared
/// lock. `functions` are those whose digest the Config has. Where a device has most_function_kernels of
/// these, the quarter that was asked for longest ago is unloaded, once the device has done its work: not what
/// a copy of LoadedKernel or a captured graph may still launch.
constexpr std::size_t most_function_kernels = 256;
LoadedKernel loaded_kernel(int device, const KernelSpec& kernel, const KernelConfig& config,
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
