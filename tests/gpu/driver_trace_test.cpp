// A traced kernel's launch on a driver of our own (fake/).
#include "api/make_problem.hpp"
#include "driver_fixture.hpp"
#include "harness/error_of.hpp"
#include "tandem/error.hpp"

namespace tandem::gpu {
namespace {

TEST_F(FakeDriver, ATracedKernelRunsTwiceAndGivesTheRecordsOfItsWarps) {
  Memory m;
  const ForwardConfig config = config_of_calls();
  const auto records = run_traced(make_problem(m.args), config, 7);
  ASSERT_EQ(driver->launches.size(), 2U);
  for (const fake::Launch& launch : driver->launches) {
    EXPECT_EQ(launch.config.grid_x, 7U);
    EXPECT_EQ(launch.config.block_x, static_cast<unsigned>(config.threads()));
    EXPECT_EQ(launch.config.shared_bytes,
              static_cast<unsigned>(forward_shared_bytes(config) + trace_shared_bytes));
    EXPECT_EQ(launch.params.out, m.out.data());
    EXPECT_EQ(launch.params.tile_counter, nullptr);
  }
  EXPECT_EQ(driver->trace_target.block, 0U);
  ASSERT_EQ(records.size(), static_cast<std::size_t>(config.threads()) / 32);
  for (std::size_t w = 0; w < records.size(); ++w) {
    ASSERT_EQ(records[w].size(), 1U) << "what was not written is left out";
    EXPECT_EQ(records[w][0].clock, 100 + w);
    EXPECT_EQ(records[w][0].event(), TraceEvent::join);
    EXPECT_EQ(records[w][0].thing(), w);
  }
}

TEST_F(FakeDriver, ATracedKernelThatLeavesNoSharedMemoryIsRefused) {
  Memory m;
  ForwardConfig config = config_of_calls();
  config.stages = 8;
  const std::string error =
      error_of(Status::unsupported, [&] { run_traced(make_problem(m.args), config, 1); });
  EXPECT_NE(error.find("shared memory"), std::string::npos) << error;
  EXPECT_TRUE(driver->launches.empty());
}

}  // namespace
}  // namespace tandem::gpu
