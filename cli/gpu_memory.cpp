#include "gpu_memory.hpp"

#include "gpu/compiler.hpp"
#include "gpu/describe.hpp"
#include "ops/plan_gpu.hpp"

namespace tandem::cli {

void GpuMemory::add(TensorSet& tensors) {
  for (auto& [name, tensor] : tensors) {
    gpu::DeviceBuffer buffer(device.index, tensor.bytes().size() + 1);  // an empty tensor has an address too
    buffer.copy_from_host(tensor.bytes().data(), tensor.bytes().size());
    buffers_.insert_or_assign(tensor.bytes().data(), std::move(buffer));
  }
}

void GpuMemory::poison(const TensorSet& tensors) {
  for (const auto& [name, tensor] : tensors) buffers_.at(tensor.bytes().data()).fill(0xFF);
}

void GpuMemory::fetch(TensorSet& tensors) const {
  for (auto& [name, tensor] : tensors) {
    buffers_.at(tensor.bytes().data()).copy_to_host(tensor.bytes().data(), tensor.bytes().size());
  }
  gpu::synchronize(device.index);
}

bool gpu_available() {
  const gpu::Description description = gpu::describe();
  return !description.devices.empty() && description.devices.front().supported;
}

bool is_objection_of_gpu(const std::string& message) {
  if (message == gpu::why_no_compiler()) return true;
  try {
    check_gpu(GpuMemory::device.index);
    return false;
  } catch (const Error& error) {
    return message == error.what();
  }
}

double gpu_nominal_gflops() {
  constexpr double operations = 4096;
  const gpu::DeviceProperties& p = gpu::properties(GpuMemory::device.index);
  return operations * p.multiprocessors * p.clock_khz * 1e3 / 1e9;
}

}  // namespace tandem::cli
