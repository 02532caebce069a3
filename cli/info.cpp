// tandem info: what this machine and this build have; or what a file has.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <vector>

#include "command.hpp"
#include "cpu/cpu.hpp"
#include "files/npy.hpp"
#include "files/safetensors.hpp"
#include "files/source.hpp"
#include "gpu/describe.hpp"
#include "report.hpp"
#include "tandem/attention.hpp"

namespace tandem::cli {
namespace {

struct InfoOptions {
  std::vector<std::string> paths;
  bool json = false;
};

Json gpu_json(const gpu::Description& d) {
  Json devices = Json::array();
  for (const gpu::DeviceSummary& device : d.devices) {
    devices.push_back({{"name", device.name},
                       {"capability", device.capability},
                       {"multiprocessors", device.multiprocessors},
                       {"clock_mhz", device.clock_mhz},
                       {"memory_gib", static_cast<double>(device.memory_bytes) / 0x1p30},
                       {"supported", device.supported},
                       {"kernels", device.kernels},
                       {"portable", device.portable}});
  }
  return {{"driver", d.driver},
          {"devices", devices},
          {"compiler", d.compiler},
          {"kernel_cache", d.cache_directory},
          {"kernel_cache_refusal", d.cache_refusal},
          {"shipped_kernels", d.shipped_kernels}};
}

/// Which kernels a GPU takes, and why.
std::string kernels_of(const gpu::DeviceSummary& device) {
  if (device.kernels == "sm90") return "; kernels sm90, by WGMMA and TMA";
  if (device.kernels == "sm80" && !device.portable.empty())
    return "; kernels sm80, since it has no WGMMA: in 16 bits, as portable PTX, since " + device.portable;
  if (device.kernels == "sm80") return "; kernels sm80, since it has no WGMMA: in 16 bits";
  return "; no kernels for it, which need compute capability 8.0";
}

int info_machine(bool json) {
  const Machine m = machine();
  const gpu::Description gpus = gpu::describe();
  std::vector<std::string> names;
  for (const cpu::Target target : cpu::available_targets()) names.emplace_back(cpu::name_of(target));
  const std::string compiler = __VERSION__;
  if (json) {
    print_json({{"version", version()},
                {"compiler", compiler},
                {"machine", to_json(m)},
                {"backends", {{"cpu", {{"targets", names}, {"best", m.target}}}, {"gpu", gpu_json(gpus)}}}});
    return success;
  }
  fmt::print("tandem      {} (built with {})\n", version(), compiler);
  fmt::print("system      {}\n", m.system);
  fmt::print("processor   {}\n", m.processor);
  fmt::print("cores       {} usable\n", m.cores);
  fmt::print("memory      {:.1f} GiB\n", m.memory_gib);
  const std::string why = cpu::why_best_target();
  fmt::print("cpu         {}; runs {}{}\n", fmt::join(names, ", "), m.target, why.empty() ? "" : ": " + why);
  fmt::print("gpu driver  {}\n", gpus.driver);
  for (const gpu::DeviceSummary& device : gpus.devices) {
    fmt::print("gpu         {}, compute capability {}, {} multiprocessors{}\n", device.name,
               device.capability, device.multiprocessors, kernels_of(device));
  }
  fmt::print("compiler    {}\n", gpus.compiler);
  fmt::print("kernels     {} shipped; cache {}{}\n", gpus.shipped_kernels,
             gpus.cache_directory.empty() ? "none" : gpus.cache_directory,
             gpus.cache_refusal.empty() ? "" : ", not used: it " + gpus.cache_refusal);
  return success;
}

void print_entry(const std::string& name, const std::string& dtype, const std::string& shape) {
  fmt::print("  {:<20} {:<8} ({})\n", files::printable(name), files::printable(dtype), shape);
}

Json info_file(const std::string& path, bool json) {
  Json document{{"file", path}, {"tensors", Json::object()}};
  if (!json) fmt::print("{}\n", files::printable(path));
  if (path.ends_with(".npy")) {
    const files::ArrayDescription array = files::read_npy_description(*files::open_file(path));
    document["tensors"]["array"] = {{"dtype", array.descr}, {"shape", array.shape}};
    if (!json) print_entry("array", array.descr, fmt::format("{}", fmt::join(array.shape, ", ")));
    return document;
  }
  const files::Safetensors file(files::open_file(path));
  for (const auto& [name, entry] : file.entries()) {
    document["tensors"][name] = {{"dtype", entry.dtype_name}, {"shape", entry.shape}};
    if (!json) print_entry(name, entry.dtype_name, fmt::format("{}", fmt::join(entry.shape, ", ")));
  }
  for (const auto& [key, value] : file.metadata()) {
    document["metadata"][key] = value;
    if (!json) fmt::print("  {:<20} {}\n", files::printable(key), files::in_quotes(value));
  }
  return document;
}

int run_info(const InfoOptions& options) {
  if (options.paths.empty()) return info_machine(options.json);
  Json documents = Json::array();
  for (const std::string& path : options.paths) documents.push_back(info_file(path, options.json));
  if (options.json) print_json(documents);
  return success;
}

}  // namespace

void add_info(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<InfoOptions>();
  CLI::App* command =
      app.add_subcommand("info", "Show the machine, the backends and the versions; or what files hold");
  command->add_option("FILES", options->paths,
                      "Show the tensors of these .safetensors or .npy files instead");
  command->add_flag("--json", options->json, "Print as JSON");
  command->footer(R"(Examples:
  tandem info
  tandem info data/minilm.safetensors)");
  command->callback([options, &chosen] { chosen = [options] { return run_info(*options); }; });
}

}  // namespace tandem::cli
