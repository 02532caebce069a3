#include "info.hpp"

#include <nanobind/stl/function.h>
#include <nanobind/stl/string.h>

#include "cpu/cpu.hpp"
#include "energy.hpp"
#include "gpu/describe.hpp"
#include "gpu/device.hpp"
#include "peak.hpp"
#include "tandem/stats.hpp"

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

nb::dict stats_info() {
  const auto text = [](std::string_view view) { return nb::str(view.data(), view.size()); };
  const auto rows_of = [](const auto& counted, const auto& write) {
    nb::list rows;
    for (const auto& one : counted) {
      nb::dict row;
      write(row, one);
      rows.append(row);
    }
    return rows;
  };
  const Stats all = stats();
  nb::dict info;
  info["calls"] = rows_of(all.calls, [&](nb::dict& row, const CallStats& c) {
    row["operation"] = text(c.operation);
    row["backend"] = text(c.backend);
    row["family"] = text(c.family);
    row["kernel"] = text(c.kernel);
    row["calls"] = c.calls;
    row["nanoseconds"] = c.nanoseconds;
    row["bytes"] = c.bytes;
    row["operations"] = c.operations;
    row["workspace_peak"] = c.workspace_peak;
  });
  info["kernels"] = rows_of(all.kernels, [&](nb::dict& row, const KernelStats& k) {
    row["origin"] = text(k.origin);
    row["kernels"] = k.kernels;
    row["nanoseconds"] = k.nanoseconds;
  });
  info["errors"] = rows_of(all.errors, [&](nb::dict& row, const ErrorStats& e) {
    row["status"] = text(e.status);
    row["rule"] = text(e.rule);
    row["errors"] = e.errors;
  });
  return info;
}

nb::tuple energy_meter(int device) {
  const bench::EnergyMeter meter = device < 0 ? bench::cpu_energy() : bench::gpu_energy(device);
  return nb::make_tuple(meter.what, meter.joules ? nb::cast(meter.joules) : nb::none());
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
