#include "gpu/launch.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "config/fields.hpp"
#include "gpu/kernels.hpp"
#include "problem/stats.hpp"
#include "tandem/error.hpp"

namespace tandem::gpu {
namespace {

struct Key {
  KernelConfig config;
  const KernelSpec* kernel;
  int device;
  bool operator==(const Key&) const = default;
};

struct Hash {
  std::size_t operator()(const Key& key) const {
    auto h = static_cast<std::uint64_t>(key.device) << 8 | reinterpret_cast<std::uintptr_t>(key.kernel);
    std::visit(
        [&h](const auto& config) {
          for_each_field(config, [&h](std::string_view /*name*/, auto value) {
            h = (h ^ static_cast<std::uint64_t>(value)) * 0x9e3779b97f4a7c15U;
            h ^= h >> 32;
          });
        },
        key.config);
    return h;
  }
};

/// Whether a Config's kernel is compiled with the call's functions.
bool takes_functions(const KernelConfig& config) {
  return std::visit(
      [](const auto& c) {
        if constexpr (requires { c.functions; }) {
          return c.functions.given();
        } else {
          return false;
        }
      },
      config);
}

/// "9.0" of PTX that begins with ".version 9.0".
std::string ptx_version(std::string_view ptx) {
  constexpr std::string_view directive = ".version ";
  const std::size_t at = ptx.find(directive);
  if (at == std::string_view::npos) return "of an unknown version";
  const std::string_view rest = ptx.substr(at + directive.size());
  return std::string(rest.substr(0, rest.find_first_of("\r\n ")));
}

/// Throws Error for an image that the driver refused, with what would help where that is known.
void check_loaded(abi::Result result, const CompiledKernel& kernel, int device, const KernelName& name) {
  if (result == abi::error_unsupported_ptx_version && kernel.is_ptx()) {
    int version = 0;
    check(driver().driver_get_version(&version), "cuDriverGetVersion");
    fail(Status::unsupported,
         "the NVIDIA driver of {} is for CUDA {}.{}, too old for PTX {}, which the portable kernels "
         "are; update the driver, or install an NVRTC of its version that knows {} (pip install "
         "nvidia-cuda-nvrtc-cu12 for CUDA 12)",
         called(device), version / 1000, version % 1000 / 10,
         ptx_version({kernel.image.data(), kernel.image.size()}), name.architecture);
  }
  if (result == abi::error_invalid_image || result == abi::error_no_binary_for_gpu) {
    fail(Status::runtime,
         "{} cannot load {}, compiled for {}: its image is damaged, or for another GPU; "
         "remove the kernel cache {}, or reinstall Tandem where the kernel is shipped",
         called(device), name.expression, name.architecture, default_cache_directory().string());
  }
  check(result, "cuModuleLoadData");
}

/// All kernels that calls have loaded. A lookup takes `mutex` shared; loading and unloading take `loading`,
/// too, and `mutex` for as long as they change the table.
struct Loaded {
  std::mutex loading;
  std::shared_mutex mutex;
  std::unordered_map<Key, LoadedKernel, Hash> kernels;
  std::atomic<unsigned long long> questions = 0;

  LoadedKernel find(const Key& key) {
    const std::shared_lock lock(mutex);
    const auto at = kernels.find(key);
    if (at == kernels.end()) return {};
    if (at->second.use != nullptr) at->second.use->last = ++questions;
    return at->second;
  }

  void add(const Key& key, const LoadedKernel& kernel) {
    if (kernel.use != nullptr) {
      kernel.use->last = ++questions;
      make_room(key.device);
    }
    const std::unique_lock lock(mutex);
    kernels.emplace(key, kernel);
  }

 private:
  using Entry = std::pair<const Key, LoadedKernel>;

  /// With functions, on a device: of those that nobody has, the quarter of most_function_kernels that was
  /// used longest ago, out of the table; none where there is room.
  std::vector<Entry> remove_unused(int device) {
    const std::unique_lock lock(mutex);
    std::size_t count = 0;
    std::vector<const Entry*> unused;
    for (const Entry& entry : kernels) {
      const std::shared_ptr<KernelUse>& use = entry.second.use;
      if (use == nullptr || entry.first.device != device) continue;
      ++count;
      if (use.use_count() == 1 && !use->captured) unused.push_back(&entry);
    }
    if (count < most_function_kernels) return {};
    std::ranges::sort(unused, {}, [](const Entry* entry) { return entry->second.use->last.load(); });
    unused.resize(std::min(unused.size(), most_function_kernels / 4));
    std::vector<Entry> taken;
    taken.reserve(unused.size());
    for (const Entry* entry : unused) taken.push_back(*entry);
    for (const Entry& entry : taken) kernels.erase(entry.first);
    return taken;
  }

  void make_room(int device) {
    std::vector<Entry> taken = remove_unused(device);
    if (taken.empty()) return;
    const ContextGuard guard(device);
    // Their last launches may still run. A device that cannot be waited for, as while a stream is captured,
    // keeps them.
    if (driver().context_synchronize() != abi::success) {
      const std::unique_lock lock(mutex);
      for (const Entry& entry : taken) kernels.insert(entry);
      return;
    }
    for (const auto& [key, kernel] : taken) {
      driver().module_unload(kernel.module);
      forget_kernel(kernel.use->name);
    }
  }
};

}  // namespace

LoadedKernel load_kernel(int device, const KernelName& name, int shared_bytes) {
  const FoundKernel found = find_kernel(name);
  const ContextGuard guard(device);
  LoadedKernel loaded{.shared_bytes = shared_bytes, .portable = found.kernel->is_ptx()};
  check_loaded(driver().module_load_data(&loaded.module, found.kernel->image.data()), *found.kernel, device,
               name);
  check(driver().module_get_function(&loaded.function, loaded.module, found.kernel->symbol.c_str()),
        "cuModuleGetFunction");
  check(driver().function_set_attribute(loaded.function,
                                        abi::FunctionAttribute::max_dynamic_shared_size_bytes, shared_bytes),
        "cuFuncSetAttribute");
  // All of it for shared memory: several CTAs may fit an SM.
  if (shared_bytes > 0) {
    check(driver().function_set_attribute(loaded.function,
                                          abi::FunctionAttribute::preferred_shared_memory_carveout, 100),
          "cuFuncSetAttribute");
  }
  return loaded;
}

LoadedKernel loaded_kernel(int device, const KernelSpec& kernel, const KernelConfig& config,
                           const CallFunctions& functions) {
  static Loaded all;
  const Key key{.config = config, .kernel = &kernel, .device = device};
  if (LoadedKernel known = all.find(key); known.function != nullptr) return known;
  KernelName name = kernel.name(config);
  name.architecture = architecture_of(properties(device));
  if (takes_functions(config)) name.functions = function_source(functions);
  find_kernel(name);  // several may be compiled at once, and are then loaded one by one
  const std::lock_guard lock(all.loading);
  if (LoadedKernel known = all.find(key); known.function != nullptr) return known;
  const BlockShape shape = kernel.block(config);
  LoadedKernel loaded = load_kernel(device, name, shape.shared_bytes);
  constexpr int portable_cluster = 8;  // blocks, which every GPU with clusters takes
  if (shape.cluster > portable_cluster) {
    const ContextGuard guard(device);
    check(driver().function_set_attribute(loaded.function,
                                          abi::FunctionAttribute::non_portable_cluster_size_allowed, 1),
          "cuFuncSetAttribute");
  }
  if (takes_functions(config)) {
    loaded.use = std::make_shared<KernelUse>();
    loaded.use->name = std::move(name);
  }
  all.add(key, loaded);
  return loaded;
}

void launch(const LoadedKernel& kernel, const LaunchShape& shape, const void* params) {
  abi::LaunchAttribute attributes[3] = {};
  unsigned int count = 0;
  if (shape.cluster > 1) {
    attributes[count].id = abi::LaunchAttributeId::cluster_dimension;
    attributes[count++].value.cluster = {shape.cluster, 1, 1};
  }
  if (shape.programmatic && !kernel.portable) {
    attributes[count].id = abi::LaunchAttributeId::programmatic_stream_serialization;
    attributes[count++].value.programmatic_stream_serialization = 1;
  }
  if (shape.resident) {
    attributes[count].id = abi::LaunchAttributeId::cooperative;
    attributes[count++].value.cooperative = 1;
  }
  const abi::LaunchConfig config{.grid_x = shape.grid,
                                 .grid_y = 1,
                                 .grid_z = 1,
                                 .block_x = shape.threads,
                                 .block_y = 1,
                                 .block_z = 1,
                                 .shared_bytes = static_cast<unsigned int>(kernel.shared_bytes),
                                 .stream = shape.stream,
                                 .attributes = attributes,
                                 .attribute_count = count};
  if (kernel.use != nullptr) {
    int capturing = 0;  // what cannot be told, as of the default stream beside a captured one, may be
    const abi::Result asked = driver().stream_is_capturing(shape.stream, &capturing);
    if (asked != abi::success || capturing != 0) kernel.use->captured = true;
  }
  void* arguments[] = {const_cast<void*>(params)};
  check(driver().launch_kernel(&config, kernel.function, arguments, nullptr), "cuLaunchKernelEx");
}

}  // namespace tandem::gpu
