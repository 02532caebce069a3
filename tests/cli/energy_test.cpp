// The meters of bench/energy.hpp, on a library and a folder of our own.
#include "energy.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "harness/temporary_folder.hpp"

namespace tandem::bench {
namespace {

namespace fs = std::filesystem;

TEST(GpuEnergy, IsWhatTheBoardsCounterGrewBy) {
  const EnergyMeter meter = gpu_energy(0, TANDEM_FAKE_NVML, TANDEM_FAKE_NVML);
  ASSERT_TRUE(meter.joules) << meter.what;
  EXPECT_EQ(meter.joules(), 0.5);
  EXPECT_EQ(meter.joules(), 1.0);
}

TEST(GpuEnergy, SaysWhyThereIsNone) {
  const auto why = [](const EnergyMeter& meter) {
    EXPECT_FALSE(meter.joules);
    return meter.what;
  };
  EXPECT_EQ(why(gpu_energy(1, TANDEM_FAKE_NVML, TANDEM_FAKE_NVML)),
            "NVML has no counter of energy for this GPU: error 3");
  EXPECT_EQ(why(gpu_energy(2, TANDEM_FAKE_NVML, TANDEM_FAKE_NVML)), "NVML does not know GPU 2");
  EXPECT_EQ(why(gpu_energy(0, "libno.so")), "libno.so cannot be opened");
  EXPECT_EQ(why(gpu_energy(0, TANDEM_FAKE_NVML, "libno.so")),
            "libno.so cannot be opened, or has no counter of energy");
}

class CpuEnergy : public testing::Test {
 protected:
  void zone(const std::string& directory, const std::string& name, const std::string& microjoules) const {
    fs::create_directories(folder / directory);
    std::ofstream(folder / directory / "name") << name << "\n";
    std::ofstream(folder / directory / "max_energy_range_uj") << "10000000\n";
    std::ofstream(folder / directory / "energy_uj") << microjoules << "\n";
  }

  harness::TemporaryFolder temporary;
  const fs::path& folder = temporary.path();
};

TEST_F(CpuEnergy, AddsPackagesAndMemoryAndCountsPastTheirRange) {
  zone("intel-rapl:0", "package-0", "9000000");
  zone("intel-rapl:1", "package-1", "1000000");
  zone("intel-rapl:0:0", "core", "1000000");
  zone("intel-rapl:0:1", "dram", "1000000");
  zone("intel-rapl-mmio:0", "package-0", "1000000");
  const EnergyMeter meter = cpu_energy(folder);
  ASSERT_TRUE(meter.joules) << meter.what;
  EXPECT_EQ(meter.joules(), 0.0);
  zone("intel-rapl:0", "package-0", "2000000");  // 3 J: it began again behind 10
  zone("intel-rapl:0:0", "core", "2000000");
  zone("intel-rapl:0:1", "dram", "1500000");
  zone("intel-rapl-mmio:0", "package-0", "2000000");
  EXPECT_EQ(meter.joules(), 3.5);
  zone("intel-rapl:1", "package-1", "");  // being written
  EXPECT_EQ(meter.joules(), 3.5);
  zone("intel-rapl:1", "package-1", "3000000");
  EXPECT_EQ(meter.joules(), 5.5);
}

TEST_F(CpuEnergy, SaysWhyThereIsNone) {
  EXPECT_EQ(cpu_energy(folder).what, folder.string() + " has no RAPL counter of a package");
  setenv("TANDEM_POWERCAP", "/nonexistent", 1);
  EXPECT_EQ(cpu_energy().what, "/nonexistent has no RAPL counter of a package");
  unsetenv("TANDEM_POWERCAP");
  zone("intel-rapl:0", "package-0", "");
  EXPECT_EQ(cpu_energy(folder).what, (folder / "intel-rapl:0/energy_uj").string() +
                                         " cannot be read; run as root, or make it readable");
  EXPECT_FALSE(cpu_energy(folder).joules);
}

}  // namespace
}  // namespace tandem::bench
