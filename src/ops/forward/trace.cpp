#include "ops/forward/trace.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "gpu/device.hpp"
#include "gpu/launch.hpp"
#include "gpu/tensor_map.hpp"
#include "ops/forward/launch.hpp"
#include "tandem/error.hpp"

namespace tandem::gpu {
namespace {

/// A block of keys makes some 30 of a consumer warp: room for two thousand blocks.
constexpr unsigned int records_a_warp = 1U << 16;

/// Tells the kernel where its records go.
void set_target(const LoadedKernel& kernel, const TraceTarget& target) {
  abi::DevicePointer symbol = 0;
  std::size_t bytes = 0;
  check(driver().module_get_global(&symbol, &bytes, kernel.module, "tandem_trace_target"),
        "cuModuleGetGlobal");
  if (bytes != sizeof(target)) {
    throw Error(Status::internal,
                fmt::format("tandem_trace_target has {} bytes, not {}", bytes, sizeof(target)));
  }
  check(driver().copy_to_device_async(symbol, &target, sizeof(target), nullptr), "cuMemcpyHtoDAsync");
}

}  // namespace

KernelName traced_kernel_name(const ForwardConfig& config) {
  KernelName name = kernels::forward.name(config);
  name.header = "ops/forward/sm90/traced_forward.cuh";
  return name;
}

std::vector<std::vector<TraceRecord>> run_traced(const Problem& problem, const ForwardConfig& config,
                                                 unsigned int blocks) {
  const int device = problem.device.index;
  const BlockShape shape = kernels::forward.block(config);
  const int shared = shape.shared_bytes + trace_shared_bytes;
  if (const int most = properties(device).shared_bytes_per_block; shared > most) {
    throw Error(
        Status::unsupported,
        fmt::format("the kernel takes {} bytes of shared memory, and a traced one {} more: the GPU has {}; "
                    "trace one with fewer stages or smaller tiles",
                    shape.shared_bytes, trace_shared_bytes, most));
  }
  const LoadedKernel kernel = load_kernel(device, traced_kernel_name(config), shared);
  const ContextGuard guard(device);
  const auto warps = static_cast<std::size_t>(shape.threads) / 32;
  DeviceBuffer records(device, warps * records_a_warp * sizeof(TraceRecord));
  set_target(
      kernel,
      {.records = static_cast<TraceRecord*>(records.data()), .records_a_warp = records_a_warp, .block = 0});
  const ForwardParams params =
      make_forward_params(problem, config.tiling, forward_maps(problem, config.tiling), encode_tensor_map,
                          properties(device).multiprocessors, nullptr);
  for (int i = 0; i < 2; ++i) {
    records.fill(0);
    launch(kernel, {.grid = blocks, .threads = static_cast<unsigned int>(shape.threads)}, &params);
  }
  synchronize(device);

  std::vector<std::vector<TraceRecord>> found(warps, std::vector<TraceRecord>(records_a_warp));
  for (std::size_t w = 0; w < warps; ++w) {
    const std::size_t bytes = records_a_warp * sizeof(TraceRecord);
    records.copy_to_host(found[w].data(), bytes, nullptr, w * bytes);
  }
  synchronize(device);
  for (std::vector<TraceRecord>& warp : found) {
    if (warp.back().what != 0) {
      throw Error(Status::runtime, fmt::format("a warp wrote more than {} records; trace fewer keys or tiles",
                                               records_a_warp));
    }
    warp.erase(std::ranges::find(warp, 0U, &TraceRecord::what), warp.end());
  }
  return found;
}

}  // namespace tandem::gpu
