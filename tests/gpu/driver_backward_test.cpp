// Backward's launches and workspaces on a driver of our own (fake/).
#include <string>
#include <vector>

#include "driver_fixture.hpp"

namespace tandem::gpu {
namespace {

TEST_F(FakeDriver, ABackwardCallIsAFewLaunchesInAWorkspaceOfItsOwn) {
  BackwardMemory m;
  m.backward.dout.data = static_cast<char*>(m.dout.data()) + 2;  // to be packed
  Execution execution{.stream = reinterpret_cast<void*>(0x555)};
  execution.workspace_bytes = workspace_bytes(m.backward);
  const DeviceBuffer workspace(1, execution.workspace_bytes);
  execution.workspace = workspace.data();
  driver->calls.clear();
  driver->launches.clear();
  backward(m.backward, execution);
  const std::vector<const char*> kernels = {"pack", "backward_preprocess", "backwardIX", "backward_convert",
                                            "backward_sink"};
  ASSERT_EQ(driver->launches.size(), kernels.size());
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    const fake::Launch& launch = driver->launches[i];
    EXPECT_NE(launch.symbol.find(kernels[i]), std::string::npos) << launch.symbol;
    EXPECT_EQ(launch.config.stream, execution.stream);
    // The main kernel and the conversion may start while what is before them ends.
    EXPECT_EQ(launch.attributes.size(), i == 2 || i == 3 ? 1U : 0U) << launch.symbol;
  }
  const BackwardConfig config = backward_config_of_calls();
  EXPECT_EQ(driver->launches[1].config.grid_x,
            2U * 4U * static_cast<unsigned>((299 + config.tiling.block_m) / config.tiling.block_m));
  EXPECT_EQ(driver->launches[2].config.grid_x,
            2U * 4U * static_cast<unsigned>((299 + config.tiling.block_n) / config.tiling.block_n));
  EXPECT_EQ(driver->launches[2].config.shared_bytes, static_cast<unsigned>(backward_shared_bytes(config)));
  EXPECT_EQ(count("cuMemAllocAsync") + count("cuMemAlloc"), 0);
  execution.workspace_bytes -= 1;
  EXPECT_THROW(backward(m.backward, execution), Error);
}

TEST_F(FakeDriver, ABackwardCallWithoutAWorkspaceFreesWhatItTook) {
  BackwardMemory m;
  backward(m.backward);
  const int live = driver->live_allocations;
  driver->calls.clear();
  backward(m.backward);
  EXPECT_EQ(count("cuMemAllocAsync"), 1);
  EXPECT_EQ(driver->live_allocations, live);
  EXPECT_NE(explain(m.backward).find("backward_preprocess"), std::string::npos);
}

}  // namespace
}  // namespace tandem::gpu
