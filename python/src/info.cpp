#include "info.hpp"

#include <nanobind/stl/string.h>

#include "cpu/cpu.hpp"
#include "gpu/describe.hpp"
#include "gpu/device.hpp"
#include "peak.hpp"

namespace tandem::python {

nb::dict cpu_info() {
  nb::list targets;
  for (const cpu::Target target : cpu::available_targets()) targets.append(cpu::name_of(target));
  nb::dict info;
  info["target"] = cpu::name_of(cpu::best_target());
  info["targets"] = targets;
  return info;
}

nb::dict gpu_info() {
  const gpu::Description description = [] {
    const nb::gil_scoped_release release;  // it may start the driver
    return gpu::describe();
  }();
  nb::list devices;
  for (const gpu::DeviceSummary& summary : description.devices) {
    nb::dict device;
    device["name"] = summary.name;
    device["capability"] = summary.capability;
    device["multiprocessors"] = summary.multiprocessors;
    device["clock_mhz"] = summary.clock_mhz;
    device["memory_gib"] = static_cast<double>(summary.memory_bytes) / 0x1p30;
    device["supported"] = summary.supported;
    device["kernels"] = summary.kernels;
    device["portable"] = summary.portable;
    devices.append(device);
  }
  nb::dict info;
  info["driver"] = description.driver;
  info["devices"] = devices;
  info["compiler"] = description.compiler;
  info["kernel_cache"] = description.cache_directory;
  info["kernel_cache_refusal"] = description.cache_refusal;
  info["shipped_kernels"] = description.shipped_kernels;
  return info;
}

nb::dict described_devices() {
  nb::dict devices;
  int index = gpu::first_described;
  for (const gpu::DeviceProperties& device : gpu::described_devices()) {
    devices[nb::str(device.name.c_str())] = index++;
  }
  return devices;
}

nb::dict peak_info(int threads, double seconds) {
  bench::Peak peak;
  {
    const nb::gil_scoped_release unlocked;
    peak = bench::measure_peak(threads, seconds);
  }
  nb::dict info;
  info["threads"] = peak.threads;
  info["f32_gflops"] = peak.f32_gflops;
  info["bf16_gflops"] = peak.bf16_gflops;
  info["f32_instructions"] = peak.f32_instructions;
  return info;
}

}  // namespace tandem::python
