#include "energy.hpp"

#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <system_error>
#include <vector>

namespace tandem::bench {
namespace {

namespace fs = std::filesystem;

/// A function of a library that stays open; null if the library or the function is missing.
template <typename Function>
Function* find(const char* library, const char* name) {
  void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  return opened == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(opened, name));
}

template <typename Value>
std::optional<Value> read(const fs::path& path) {
  std::ifstream file(path);
  Value value;
  if (!(file >> value)) return std::nullopt;
  return value;
}

/// A counter of microjoules that starts again at 0 behind `range`.
struct Counter {
  fs::path file;
  double range = 0.0;
  double last = 0.0;
  double total = 0.0;

  double microjoules() {
    const double now = read<double>(file).value_or(last);
    total += now < last ? now + range - last : now - last;
    last = now;
    return total;
  }
};

}  // namespace

EnergyMeter gpu_energy(int device, const char* cuda, const char* nvml) {
  using Board = void*;
  const auto bus_id = find<int(char*, int, int)>(cuda, "cuDeviceGetPCIBusId");
  const auto init = find<int()>(nvml, "nvmlInit_v2");
  const auto handle = find<int(const char*, Board*)>(nvml, "nvmlDeviceGetHandleByPciBusId_v2");
  const auto consumed = find<int(Board, unsigned long long*)>(nvml, "nvmlDeviceGetTotalEnergyConsumption");
  if (bus_id == nullptr) return {std::string(cuda) + " cannot be opened", {}};
  if (init == nullptr || handle == nullptr || consumed == nullptr)
    return {std::string(nvml) + " cannot be opened, or has no counter of energy", {}};
  std::array<char, 32> name{};
  Board board = nullptr;
  if (bus_id(name.data(), static_cast<int>(name.size()), device) != 0 || init() != 0 ||
      handle(name.data(), &board) != 0)
    return {"NVML does not know GPU " + std::to_string(device), {}};
  unsigned long long start = 0;
  if (const int status = consumed(board, &start); status != 0)
    return {"NVML has no counter of energy for this GPU: error " + std::to_string(status), {}};
  return {"the GPU's board, by NVML", [=, last = start]() mutable {
            unsigned long long now = 0;
            if (consumed(board, &now) == 0) last = now;
            return static_cast<double>(last - start) / 1e3;
          }};
}

EnergyMeter cpu_energy(const fs::path& powercap) {
  const char* set = std::getenv("TANDEM_POWERCAP");
  const fs::path folder = !powercap.empty() ? powercap : set != nullptr ? set : "/sys/class/powercap";
  auto counters = std::make_shared<std::vector<Counter>>();
  std::error_code error;
  for (const fs::directory_entry& zone : fs::directory_iterator(folder, error)) {
    // intel-rapl-mmio counts the same packages again, other parts (core, uncore) are within a package.
    const std::string name = read<std::string>(zone.path() / "name").value_or("");
    if (!zone.path().filename().string().starts_with("intel-rapl:")) continue;
    if (!name.starts_with("package") && name != "dram") continue;
    Counter counter{.file = zone.path() / "energy_uj"};
    const auto now = read<double>(counter.file);
    if (!now) return {counter.file.string() + " cannot be read; run as root, or make it readable", {}};
    counter.last = *now;
    counter.range = read<double>(zone.path() / "max_energy_range_uj").value_or(0.0);
    counters->push_back(counter);
  }
  if (counters->empty()) return {folder.string() + " has no RAPL counter of a package", {}};
  return {"the CPU's packages, by RAPL", [counters] {
            double sum = 0.0;
            for (Counter& counter : *counters) sum += counter.microjoules();
            return sum / 1e6;
          }};
}

}  // namespace tandem::bench
