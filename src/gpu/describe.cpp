#include "gpu/describe.hpp"

#include <fmt/format.h>

#include "gpu/device.hpp"
#include "gpu/kernels.hpp"
#include "gpu/shipped.hpp"

namespace tandem::gpu {
namespace {

std::string driver_version() {
  int version = 0;
  check(driver().driver_get_version(&version), "cuDriverGetVersion");
  return fmt::format("CUDA {}.{}", version / 1000, version % 1000 / 10);
}

DeviceSummary summary_of(const DeviceProperties& p) {
  const bool sm80 = is_supported(p) && !is_hopper(p);
  return {.name = p.name,
          .capability = fmt::format("{}.{}", p.major, p.minor),
          .multiprocessors = p.multiprocessors,
          .clock_mhz = p.clock_khz / 1000,
          .memory_bytes = p.memory_bytes,
          .supported = is_supported(p),
          .kernels = is_hopper(p) ? "sm90"
                     : sm80       ? "sm80"
                                  : "",
          .portable = sm80 ? why_portable(architecture_of(p)) : ""};
}

}  // namespace

Description describe() {
  Description d;
  d.driver = why_no_driver();
  if (d.driver.empty()) {
    d.driver = driver_version();
    for (int i = 0; i < device_count(); ++i) d.devices.push_back(summary_of(properties(i)));
  }
  d.compiler = why_no_compiler();
  if (d.compiler.empty()) {
    d.compiler = fmt::format("NVRTC {}.{} ({})", compiler().major, compiler().minor, compiler().path);
  }
  d.cache_directory = default_cache_directory().string();
  d.cache_refusal = DiskCache(d.cache_directory).why_refused();
  d.shipped_kernels = shipped_kernels();
  return d;
}

}  // namespace tandem::gpu
