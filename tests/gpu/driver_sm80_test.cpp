// Both passes by the kernels sm80, on the driver of our own (fake/).
#include <cstdlib>
#include <string>
#include <vector>

#include "driver_fixture.hpp"

namespace tandem::gpu {
namespace {

class FakeDriverSm80 : public FakeDriver {
 protected:
  void SetUp() override {
    FakeDriver::SetUp();
    setenv("TANDEM_KERNELS", "sm80", 1);
  }
  void TearDown() override { unsetenv("TANDEM_KERNELS"); }
};

TEST_F(FakeDriverSm80, ACallIsOneLaunchWithoutTensorMaps) {
  Memory m;
  forward(m.args);  // compiles and loads
  driver->calls.clear();
  driver->launches.clear();
  forward(m.args);
  EXPECT_EQ(driver->calls, std::vector<std::string>{"cuLaunchKernelEx"});
  ASSERT_EQ(driver->launches.size(), 1U);
  const fake::Launch& launch = driver->launches[0];
  const Sm80ForwardConfig config = sm80_config_of_calls();
  EXPECT_NE(launch.symbol.find("sm80_forward"), std::string::npos);
  EXPECT_EQ(launch.attributes.size(), 0U);
  EXPECT_EQ(launch.params.q_data, m.q.data());
  EXPECT_EQ(launch.params.k_data, m.k.data());
  EXPECT_EQ(launch.params.out, m.out.data());
  EXPECT_EQ(launch.config.grid_x,
            2U * 4U * static_cast<unsigned>((300 + config.tiling.block_m - 1) / config.tiling.block_m));
  EXPECT_EQ(launch.config.block_x, static_cast<unsigned>(config.threads()));
  EXPECT_EQ(launch.config.shared_bytes, static_cast<unsigned>(forward_shared_bytes(config)));
}

/// Rows that 16 bytes cannot be copied of are packed first, as for TMA.
TEST_F(FakeDriverSm80, WhatCopiesCannotReadIsPacked) {
  Memory m;
  m.args.q.data = static_cast<const char*>(m.args.q.data) + 2;
  const std::size_t bytes = workspace_bytes(m.args);
  EXPECT_GE(bytes, static_cast<std::size_t>(Memory::elements) * 2);
  const DeviceBuffer workspace(1, bytes);
  forward(m.args, {.workspace = workspace.data(), .workspace_bytes = bytes});
  ASSERT_EQ(driver->launches.size(), 2U);
  EXPECT_NE(driver->launches[0].symbol.find("pack"), std::string::npos);
  EXPECT_EQ(driver->launches[1].params.q_data, workspace.data());
}

TEST_F(FakeDriverSm80, ABackwardCallHasItsOwnMainKernel) {
  BackwardMemory m;
  backward(m.backward);  // compiles and loads
  driver->launches.clear();
  backward(m.backward);
  const std::vector<const char*> kernels = {"backward_preprocess", "sm80_backward", "backward_convert",
                                            "backward_sink"};
  ASSERT_EQ(driver->launches.size(), kernels.size());
  for (std::size_t i = 0; i < kernels.size(); ++i)
    EXPECT_NE(driver->launches[i].symbol.find(kernels[i]), std::string::npos) << driver->launches[i].symbol;
  const Sm80BackwardConfig config = sm80_backward_config_of_calls();
  const fake::Launch& main = driver->launches[1];
  EXPECT_EQ(main.config.grid_x,
            2U * 4U * static_cast<unsigned>((299 + config.tiling.block_n) / config.tiling.block_n));
  EXPECT_EQ(main.config.block_x, static_cast<unsigned>(config.threads()));
  EXPECT_EQ(main.config.shared_bytes, static_cast<unsigned>(backward_shared_bytes(config)));
}

}  // namespace
}  // namespace tandem::gpu
