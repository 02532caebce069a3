// Kernels loaded into a device's context, and their launch.
#pragma once

#include <functional>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "gpu/device.hpp"
#include "gpu/kernels.hpp"
#include "kernels/config/fields.hpp"

namespace tandem::gpu {

/// A kernel in the primary context of a device, with its dynamic shared memory allowed. Lives as long as the
/// process: unloading at exit would race with the driver's own end.
struct LoadedKernel {
  abi::Function function = nullptr;
  int shared_bytes = 0;
};

/// Finds, loads and configures a kernel. Slow (milliseconds, seconds if it must be compiled): see
/// KernelTable.
LoadedKernel load_kernel(int device, const KernelName& name, int shared_bytes);

struct LaunchShape {
  unsigned int grid = 1;
  unsigned int threads = 128;
  abi::Stream stream = nullptr;
  unsigned int cluster = 1;   ///< blocks of a cluster
  bool programmatic = false;  ///< may start while the grid before it in the stream ends (griddepcontrol)
  bool resident = false;      ///< starts when there is room for all of its blocks, which wait for each other
};

/// Launches on the current context. `params` is the kernel's one parameter.
void launch(const LoadedKernel& kernel, const LaunchShape& shape, const void* params);

/// Loaded kernels by (device, Config). A hit costs a hash of the Config's fields and a shared lock.
template <typename Config>
class KernelTable {
 public:
  /// `load(device, config)` makes what is not there yet; it may run twice for one key in a race, harmlessly.
  template <typename Load>
  LoadedKernel get(int device, const Config& config, Load&& load) {
    const Key key{config, device};
    {
      const std::shared_lock lock(mutex_);
      if (const auto at = kernels_.find(key); at != kernels_.end()) return at->second;
    }
    const LoadedKernel kernel = load(device, config);
    const std::unique_lock lock(mutex_);
    return kernels_.emplace(key, kernel).first->second;
  }

 private:
  struct Key {
    Config config;
    int device;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const {
      std::uint64_t h = static_cast<std::uint64_t>(key.device);
      for_each_field(key.config, [&](const char*, auto value) {
        h = (h ^ static_cast<std::uint64_t>(value)) * 0x9e3779b97f4a7c15U;
        h ^= h >> 32;
      });
      return h;
    }
  };

  std::shared_mutex mutex_;
  std::unordered_map<Key, LoadedKernel, Hash> kernels_;
};

}  // namespace tandem::gpu
