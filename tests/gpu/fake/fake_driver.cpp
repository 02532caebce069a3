#include "fake_driver.hpp"

#include <cstdlib>
#include <cstring>
#include <map>

namespace tandem::gpu::fake {

Driver& state() {
  static Driver driver;
  return driver;
}

}  // namespace tandem::gpu::fake

extern "C" tandem::gpu::fake::Driver* fake_driver_state() {
  return &tandem::gpu::fake::state();
}

namespace {

using namespace tandem::gpu;
using abi::Result;

/// Writes the call down; its result.
Result called(const char* name) {
  fake::Driver& d = fake::state();
  d.calls.emplace_back(name);
  if (d.failing != name) return abi::success;
  d.failing.clear();
  return d.failure;
}

template <typename Handle>
Handle handle(std::uintptr_t n) {
  return reinterpret_cast<Handle>(n);
}

Result allocate(abi::DevicePointer* pointer, std::size_t bytes) {
  *pointer = reinterpret_cast<abi::DevicePointer>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  ++fake::state().live_allocations;
  fake::state().allocated_bytes += bytes;
  return abi::success;
}

Result release(abi::DevicePointer pointer) {
  std::free(reinterpret_cast<void*>(pointer));
  --fake::state().live_allocations;
  return abi::success;
}

Result copy(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
  return abi::success;
}

std::map<std::uintptr_t, std::string>& symbols() {
  static std::map<std::uintptr_t, std::string> all;
  return all;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

Result cuGetErrorName(Result result, const char** name) {
  *name = result == abi::error_out_of_memory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return abi::success;
}
Result cuGetErrorString(Result, const char** text) {
  *text = "a failure made for a test";
  return abi::success;
}
Result cuInit(unsigned) {
  return called("cuInit");
}
Result cuDriverGetVersion(int* version) {
  *version = 13000;
  return abi::success;
}
Result cuDeviceGet(abi::Device* device, int ordinal) {
  *device = ordinal;
  return abi::success;
}
Result cuDeviceGetCount(int* count) {
  *count = fake::state().devices;
  return abi::success;
}
Result cuDeviceGetName(char* name, int bytes, abi::Device) {
  std::strncpy(name, "Fake H100", static_cast<std::size_t>(bytes));
  return abi::success;
}
Result cuDeviceGetAttribute(int* value, abi::DeviceAttribute which, abi::Device device) {
  switch (which) {
    case abi::DeviceAttribute::multiprocessor_count: *value = 132; break;
    case abi::DeviceAttribute::compute_capability_major: *value = fake::state().major; break;
    case abi::DeviceAttribute::compute_capability_minor: *value = fake::state().minor; break;
    case abi::DeviceAttribute::max_shared_memory_per_block_optin:
      *value = fake::state().shared_bytes[static_cast<std::size_t>(device)];
      break;
    case abi::DeviceAttribute::l2_cache_size: *value = 50 << 20; break;
    default: *value = 1980000; break;
  }
  return abi::success;
}
Result cuDeviceTotalMem_v2(std::size_t* bytes, abi::Device) {
  *bytes = std::size_t{80} << 30;
  return abi::success;
}
Result cuDevicePrimaryCtxRetain(abi::Context* context, abi::Device device) {
  *context = handle<abi::Context>(0x100U + static_cast<unsigned>(device));
  return called("cuDevicePrimaryCtxRetain");
}
Result cuCtxGetCurrent(abi::Context* context) {
  const auto& stack = fake::state().current;
  *context = stack.empty() ? nullptr : stack.back();
  return abi::success;
}
Result cuCtxPushCurrent_v2(abi::Context context) {
  fake::state().current.push_back(context);
  return abi::success;
}
Result cuCtxPopCurrent_v2(abi::Context* context) {
  *context = fake::state().current.back();
  fake::state().current.pop_back();
  return abi::success;
}
Result cuCtxSynchronize() {
  return called("cuCtxSynchronize");
}
Result cuModuleLoadData(abi::Module* module, const void* image) {
  *module = handle<abi::Module>(reinterpret_cast<std::uintptr_t>(image));
  fake::state().images.push_back(static_cast<const char*>(image));
  return called("cuModuleLoadData");
}
Result cuModuleUnload(abi::Module) {
  return called("cuModuleUnload");
}
Result cuModuleGetFunction(abi::Function* function, abi::Module, const char* name) {
  const std::uintptr_t id = symbols().size() + 1;
  symbols()[id] = name;
  *function = handle<abi::Function>(id);
  return called("cuModuleGetFunction");
}
Result cuModuleGetGlobal_v2(abi::DevicePointer* pointer, std::size_t* bytes, abi::Module, const char*) {
  *pointer = reinterpret_cast<abi::DevicePointer>(&fake::state().trace_target);
  *bytes = sizeof(fake::state().trace_target);
  return called("cuModuleGetGlobal");
}
Result cuFuncGetAttribute(int* value, abi::FunctionAttribute, abi::Function) {
  *value = 0;
  return abi::success;
}
Result cuFuncSetAttribute(abi::Function, abi::FunctionAttribute, int) {
  return called("cuFuncSetAttribute");
}
Result cuLaunchKernelEx(const abi::LaunchConfig* config, abi::Function function, void** arguments, void**) {
  fake::Launch launch{.config = *config,
                      .attributes = {config->attributes, config->attributes + config->attribute_count},
                      .symbol = symbols()[reinterpret_cast<std::uintptr_t>(function)],
                      .params = {}};
  if (launch.symbol.find("forward") != std::string::npos) {
    launch.params = *static_cast<const tandem::ForwardParams*>(arguments[0]);
  }
  fake::state().launches.push_back(launch);
  // What a traced kernel would write, of every warp: one record.
  if (const tandem::TraceTarget& target = fake::state().trace_target; target.records != nullptr) {
    for (unsigned warp = 0; warp < config->block_x / 32; ++warp) {
      target.records[std::size_t{warp} * target.records_a_warp] = {
          .clock = 100 + warp, .what = static_cast<unsigned>(tandem::TraceEvent::join) << 24 | warp};
    }
  }
  return called("cuLaunchKernelEx");
}
Result cuTensorMapEncodeTiled(void* map, abi::TensorMapType, std::uint32_t rank, void* base,
                              const std::uint64_t* dims, const std::uint64_t*, const std::uint32_t* box,
                              const std::uint32_t*, int, abi::TensorMapSwizzle swizzle, int, int) {
  auto& words = static_cast<tandem::TensorMap*>(map)->opaque;
  words[0] = reinterpret_cast<std::uintptr_t>(base);
  words[1] = rank;
  words[2] = dims[0];
  words[3] = dims[1];
  words[4] = static_cast<unsigned long long>(box[0]) << 32 | box[1];
  words[5] = static_cast<unsigned long long>(swizzle);
  return called("cuTensorMapEncodeTiled");
}
Result cuMemAlloc_v2(abi::DevicePointer* pointer, std::size_t bytes) {
  const Result result = called("cuMemAlloc");
  return result == abi::success ? allocate(pointer, bytes) : result;
}
Result cuMemFree_v2(abi::DevicePointer pointer) {
  if (fake::state().current.empty()) return 201;  // as the driver: invalid context
  return release(pointer);
}
Result cuMemAllocAsync(abi::DevicePointer* pointer, std::size_t bytes, abi::Stream) {
  const Result result = called("cuMemAllocAsync");
  return result == abi::success ? allocate(pointer, bytes) : result;
}
Result cuMemFreeAsync(abi::DevicePointer pointer, abi::Stream) {
  return release(pointer);
}
Result cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  *free = *total = std::size_t{80} << 30;
  return abi::success;
}
Result cuMemcpyAsync(abi::DevicePointer to, abi::DevicePointer from, std::size_t bytes, abi::Stream) {
  return copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}
Result cuMemcpyHtoDAsync_v2(abi::DevicePointer to, const void* from, std::size_t bytes, abi::Stream) {
  return copy(reinterpret_cast<void*>(to), from, bytes);
}
Result cuMemcpyDtoHAsync_v2(void* to, abi::DevicePointer from, std::size_t bytes, abi::Stream) {
  return copy(to, reinterpret_cast<const void*>(from), bytes);
}
Result cuMemcpyDtoH_v2(void* to, abi::DevicePointer from, std::size_t bytes) {
  called("cuMemcpyDtoH");
  return copy(to, reinterpret_cast<const void*>(from), bytes);
}
Result cuMemsetD8Async(abi::DevicePointer to, unsigned char value, std::size_t bytes, abi::Stream) {
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return called("cuMemsetD8Async");
}
Result cuStreamCreate(abi::Stream* stream, unsigned) {
  *stream = handle<abi::Stream>(0x200);
  return called("cuStreamCreate");
}
Result cuStreamDestroy_v2(abi::Stream) {
  return abi::success;
}
Result cuStreamSynchronize(abi::Stream) {
  return called("cuStreamSynchronize");
}
Result cuStreamIsCapturing(abi::Stream, int* capturing) {
  *capturing = fake::state().capturing ? 1 : 0;
  return abi::success;
}
Result cuEventCreate(abi::Event* event, unsigned) {
  *event = handle<abi::Event>(0x300);
  return abi::success;
}
Result cuEventDestroy_v2(abi::Event) {
  return abi::success;
}
Result cuEventRecord(abi::Event, abi::Stream) {
  return abi::success;
}
Result cuEventSynchronize(abi::Event) {
  return abi::success;
}
Result cuEventElapsedTime(float* milliseconds, abi::Event, abi::Event) {
  *milliseconds = 1.0F;
  return abi::success;
}

}  // extern "C"
#pragma GCC visibility pop
