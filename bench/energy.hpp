// The energy that a GPU's board or a CPU draws, by their own counters.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace tandem::bench {

struct EnergyMeter {
  std::string what;                ///< what counts; without `joules` why nothing does
  std::function<double()> joules;  ///< drawn since the meter was made; empty if nothing counts
};

/// NVML's counter of the board, of a GPU by CUDA's number. Libraries are opened by name or path.
EnergyMeter gpu_energy(int device, const char* cuda = "libcuda.so.1", const char* nvml = "libnvidia-ml.so.1");

/// RAPL's counters of all packages, and of their memory where it has its own. An empty folder is that of
/// TANDEM_POWERCAP, else /sys/class/powercap. To be read at least once while a counter wraps round: minutes.
EnergyMeter cpu_energy(const std::filesystem::path& powercap = {});

}  // namespace tandem::bench
