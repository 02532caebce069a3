#include "gpu/driver.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include "problem/stats.hpp"
#include "tandem/error.hpp"

namespace tandem::gpu {
namespace {

constexpr const char* remedy =
    "install the NVIDIA driver (525 or later for Hopper), or pass tensors in host memory";

struct Loaded {
  Driver table{};
  std::string objection;
  Status status = Status::ok;

  void fail(Status s, std::string why) {
    if (!objection.empty()) return;
    status = s;
    objection = std::move(why);
  }
};

std::string text_of(const Driver& d, abi::Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (d.get_error_name == nullptr || d.get_error_name(result, &name) != abi::success) name = "unknown error";
  if (d.get_error_string == nullptr || d.get_error_string(result, &text) != abi::success) text = "";
  return fmt::format("{} ({}): {}", name, result, text);
}

template <typename Function>
void find(Loaded& loaded, void* library, Function*& entry, const char* symbol) {
  entry = reinterpret_cast<Function*>(dlsym(library, symbol));
  if (entry == nullptr) {
    loaded.fail(
        Status::unsupported,
        fmt::format("the NVIDIA driver has no {}; Tandem needs driver 525 (CUDA 12.0) or later", symbol));
  }
}

Loaded load() {
  Loaded loaded;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.fail(Status::unsupported, fmt::format("no NVIDIA driver found (libcuda.so.1): {}", remedy));
    return loaded;
  }
  Driver& d = loaded.table;
  const auto get = [&](auto*& entry, const char* symbol) { find(loaded, library, entry, symbol); };
  get(d.get_error_name, "cuGetErrorName");
  get(d.get_error_string, "cuGetErrorString");
  get(d.init, "cuInit");
  get(d.driver_get_version, "cuDriverGetVersion");
  get(d.device_get, "cuDeviceGet");
  get(d.device_get_count, "cuDeviceGetCount");
  get(d.device_get_name, "cuDeviceGetName");
  get(d.device_get_attribute, "cuDeviceGetAttribute");
  get(d.device_total_memory, "cuDeviceTotalMem_v2");
  get(d.primary_context_retain, "cuDevicePrimaryCtxRetain");
  get(d.context_get_current, "cuCtxGetCurrent");
  get(d.context_push, "cuCtxPushCurrent_v2");
  get(d.context_pop, "cuCtxPopCurrent_v2");
  get(d.context_synchronize, "cuCtxSynchronize");
  get(d.module_load_data, "cuModuleLoadData");
  get(d.module_unload, "cuModuleUnload");
  get(d.module_get_function, "cuModuleGetFunction");
  get(d.module_get_global, "cuModuleGetGlobal_v2");
  get(d.function_get_attribute, "cuFuncGetAttribute");
  get(d.function_set_attribute, "cuFuncSetAttribute");
  get(d.launch_kernel, "cuLaunchKernelEx");
  get(d.tensor_map_encode_tiled, "cuTensorMapEncodeTiled");
  get(d.memory_alloc, "cuMemAlloc_v2");
  get(d.memory_free, "cuMemFree_v2");
  get(d.memory_alloc_async, "cuMemAllocAsync");
  get(d.memory_free_async, "cuMemFreeAsync");
  get(d.memory_get_info, "cuMemGetInfo_v2");
  get(d.copy_async, "cuMemcpyAsync");
  get(d.copy_to_device_async, "cuMemcpyHtoDAsync_v2");
  get(d.copy_to_host_async, "cuMemcpyDtoHAsync_v2");
  get(d.copy_to_host, "cuMemcpyDtoH_v2");
  get(d.memset_d8_async, "cuMemsetD8Async");
  get(d.stream_create, "cuStreamCreate");
  get(d.stream_destroy, "cuStreamDestroy_v2");
  get(d.stream_synchronize, "cuStreamSynchronize");
  get(d.stream_is_capturing, "cuStreamIsCapturing");
  get(d.event_create, "cuEventCreate");
  get(d.event_destroy, "cuEventDestroy_v2");
  get(d.event_record, "cuEventRecord");
  get(d.event_synchronize, "cuEventSynchronize");
  get(d.event_elapsed_time, "cuEventElapsedTime");
  if (!loaded.objection.empty()) return loaded;

  const abi::Result started = d.init(0);
  int devices = 0;
  if (started == abi::error_no_device ||
      (started == abi::success && d.device_get_count(&devices) == abi::success && devices == 0)) {
    loaded.fail(Status::unsupported,
                "the NVIDIA driver finds no GPU: check CUDA_VISIBLE_DEVICES, or pass tensors in host memory");
  } else if (started != abi::success) {
    loaded.fail(Status::runtime,
                fmt::format("the NVIDIA driver does not start: cuInit: {}", text_of(d, started)));
  }
  return loaded;
}

const Loaded& loaded_driver() {
  static const Loaded loaded = load();
  return loaded;
}

}  // namespace

const Driver& driver() {
  const Loaded& loaded = loaded_driver();
  if (!loaded.objection.empty()) fail_by("a call on a GPU needs its driver", loaded.status, loaded.objection);
  return loaded.table;
}

std::string why_no_driver() {
  return loaded_driver().objection;
}

void check(abi::Result result, const char* call) {
  if (result == abi::success) return;
  const Status status = result == abi::error_out_of_memory ? Status::out_of_memory : Status::runtime;
  fail_by(call, status, fmt::format("{}: {}", call, text_of(loaded_driver().table, result)));
}

}  // namespace tandem::gpu
