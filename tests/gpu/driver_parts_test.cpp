// The host side of forward_part and backward_part on a driver of our own (fake/).
#include <string>
#include <vector>

#include "driver_fixture.hpp"
#include "tandem/parts.hpp"

namespace tandem::gpu {
namespace {

/// The call of the other tests, with results in f32.
struct PartMemory : Memory {
  DeviceBuffer sum{1, elements * 4}, lse{1, 2 * 4 * 300 * 4};
  ForwardPartArgs part;

  PartMemory() {
    part.q = args.q;
    part.k = args.k;
    part.v = args.v;
    part.out = Tensor(sum.data(), DType::f32, {2, 300, 4, 128}, cuda);
    part.lse = Tensor(lse.data(), DType::f32, {2, 4, 300}, cuda);
    part.first_query = 300;  // behind these keys, so that causal hides none
    part.options.causal = true;
  }
};

TEST_F(FakeDriver, AForwardPartIsACallAndTwoMergesInMemoryThatIsFreed) {
  PartMemory m;
  const int live = driver->live_allocations;
  driver->launches.clear();
  const auto stream = reinterpret_cast<abi::Stream>(0x555);
  forward_part(m.part, {.stream = stream});
  ASSERT_EQ(driver->launches.size(), 3U);
  EXPECT_NE(driver->launches[0].symbol.find("forward"), std::string::npos);
  for (const std::size_t i : {1U, 2U}) EXPECT_NE(driver->launches[i].symbol.find("merge"), std::string::npos);
  for (const fake::Launch& launch : driver->launches) EXPECT_EQ(launch.config.stream, stream);
  EXPECT_NE(driver->launches[0].params.out, m.sum.data());
  EXPECT_EQ(count("cuMemAllocAsync"), 1);
  EXPECT_EQ(driver->live_allocations, live);
  EXPECT_EQ(driver->current, std::vector{other_context});
}

/// Rows of a longer result, whose LSE has other strides than the part's.
TEST_F(FakeDriver, AForwardPartIsAddedToRowsOfALongerResult) {
  PartMemory m;
  m.part.q.shape[1] = m.part.out.shape[1] = m.part.lse.shape[2] = 120;
  driver->launches.clear();
  forward_part(m.part);
  EXPECT_EQ(driver->launches.size(), 3U);
}

TEST_F(FakeDriver, TheFirstForwardPartIsWrittenInPlace) {
  PartMemory m;
  m.part.accumulate = false;
  driver->launches.clear();
  forward_part(m.part);
  ASSERT_EQ(driver->launches.size(), 1U);
  EXPECT_EQ(driver->launches[0].params.out, m.sum.data());
  EXPECT_EQ(count("cuMemAllocAsync"), 0);
}

TEST_F(FakeDriver, AForwardPartWithAWorkspaceAllocatesNothing) {
  PartMemory m;
  Execution execution;
  execution.workspace_bytes = workspace_bytes(m.part);
  EXPECT_GE(execution.workspace_bytes, 2U * (Memory::elements * 4 + 2 * 4 * 300 * 4));
  DeviceBuffer workspace(1, execution.workspace_bytes);
  execution.workspace = workspace.data();
  driver->calls.clear();
  driver->launches.clear();
  forward_part(m.part, execution);
  EXPECT_EQ(count("cuMemAllocAsync") + count("cuMemAlloc"), 0);
  EXPECT_EQ(driver->launches.at(0).params.out, workspace.data());
  driver->launches.clear();
  execution.workspace_bytes -= 1;
  EXPECT_THROW(forward_part(m.part, execution), Error);
  EXPECT_EQ(driver->launches.size(), 0U);
}

TEST_F(FakeDriver, KeysThatNoQuerySeesLaunchNothing) {
  PartMemory m;
  m.part.first_query = 0;
  m.part.first_key = 300;
  driver->launches.clear();
  driver->calls.clear();
  forward_part(m.part);
  EXPECT_EQ(driver->launches.size(), 0U);
  EXPECT_EQ(count("cuMemAllocAsync"), 0);
}

}  // namespace
}  // namespace tandem::gpu
