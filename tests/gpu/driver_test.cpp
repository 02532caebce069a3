// The host side of the GPU backend on a driver of our own (fake/): contexts, forward's launches, packing,
// workspaces, errors.
#include <array>
#include <string>
#include <vector>

#include "driver_fixture.hpp"
#include "gpu/describe.hpp"
#include "gpu/tensor_map.hpp"
#include "harness/error_of.hpp"
#include "harness/runbook.hpp"

namespace tandem::gpu {
namespace {

TEST_F(FakeDriver, ACallIsOneLaunchOnTheCallersStream) {
  Memory m;
  forward(m.args);  // compiles and loads
  driver->calls.clear();
  driver->launches.clear();
  const auto stream = reinterpret_cast<abi::Stream>(0x555);
  forward(m.args, {.stream = stream});
  std::erase(driver->calls, "cuTensorMapEncodeTiled");
  EXPECT_EQ(driver->calls, std::vector<std::string>{"cuLaunchKernelEx"});
  ASSERT_EQ(driver->launches.size(), 1U);
  const fake::Launch& launch = driver->launches[0];
  EXPECT_EQ(launch.config.stream, stream);
  EXPECT_EQ(launch.attributes.size(), 0U);
  EXPECT_EQ(launch.params.out, m.out.data());
  EXPECT_EQ(launch.params.q.opaque[0], reinterpret_cast<std::uintptr_t>(m.q.data()));
  EXPECT_EQ(launch.params.heads_q, 4);
  const ForwardConfig config = config_of_calls();
  const int tiles = 2 * 4 * ((300 + config.tiling.block_m - 1) / config.tiling.block_m);
  EXPECT_EQ(launch.config.grid_x, static_cast<unsigned>(std::min(tiles, 132)));
  EXPECT_EQ(launch.config.block_x, static_cast<unsigned>(config.threads()));
  EXPECT_EQ(launch.config.shared_bytes, static_cast<unsigned>(forward_shared_bytes(config)));
}

TEST_F(FakeDriver, AThreadKeepsTheTensorMapsThatItMadeLast) {
  alignas(128) std::array<char, 256> memory{};
  TensorMapSpec spec{.base = memory.data(), .rank = 2, .dims = {64, 3}, .strides = {128}, .box = {64, 1}};
  const TensorMap map = encode_tensor_map(spec);
  driver->calls.clear();
  EXPECT_EQ(encode_tensor_map(spec).opaque[0], map.opaque[0]);
  EXPECT_EQ(count("cuTensorMapEncodeTiled"), 0);
  spec.base = memory.data() + 128;
  EXPECT_EQ(encode_tensor_map(spec).opaque[0], map.opaque[0] + 128);
  spec.dims[1] = 2;
  EXPECT_EQ(encode_tensor_map(spec).opaque[3], 2U);
  EXPECT_EQ(count("cuTensorMapEncodeTiled"), 2);
}

TEST_F(FakeDriver, CallsAreCountedByTheirMainKernel) {
  Memory m;
  const auto calls = [] {
    std::uint64_t sum = 0;
    for (const CallStats& c : stats().calls) {
      if (c.backend == "cuda" && c.family == "sm90" && c.kernel == "forward") sum += c.calls;
    }
    return sum;
  };
  const std::uint64_t before = calls();
  m.args.q.data = static_cast<char*>(m.q.data()) + 2;  // a launch of another kernel comes first
  forward(m.args);
  EXPECT_EQ(calls(), before + 1);
}

TEST_F(FakeDriver, TilesComeFromACounterOnlyIfBlocksAreFewer) {
  Memory m;
  m.args.options.causal = true;
  Execution execution;
  EXPECT_EQ(workspace_bytes(m.args), 0U);  // 24 tiles for 132 multiprocessors
  forward(m.args, execution);
  EXPECT_EQ(driver->launches.at(0).params.tile_counter, nullptr);
  EXPECT_EQ(count("cuMemsetD8Async"), 0);
  // Every query head once more in the batch, by a stride of 0: 264 tiles and more.
  for (ConstTensor* t : {&m.args.q, &m.args.k, &m.args.v}) {
    t->shape[0] = 40;
    t->stride[0] = 0;
  }
  const DeviceBuffer out(1, Memory::elements * 2 * 20);
  m.args.out = Tensor(out.data(), DType::bf16, {40, 300, 4, 128}, cuda);
  execution.workspace_bytes = workspace_bytes(m.args);
  EXPECT_GT(execution.workspace_bytes, 0U);
  const DeviceBuffer workspace(1, execution.workspace_bytes);
  execution.workspace = workspace.data();
  driver->launches.clear();
  forward(m.args, execution);
  EXPECT_EQ(driver->launches.at(0).params.tile_counter, workspace.data());
  EXPECT_EQ(count("cuMemsetD8Async"), 1);
}

TEST_F(FakeDriver, TheContextThatWasCurrentStaysSo) {
  Memory m;
  forward(m.args);
  EXPECT_EQ(driver->current, std::vector{other_context});
  driver->failing = "cuLaunchKernelEx";
  driver->failure = 700;
  EXPECT_THROW(forward(m.args), Error);
  EXPECT_EQ(driver->current, std::vector{other_context});
}

TEST_F(FakeDriver, FailuresNameTheCallAndTheDriversReason) {
  Memory m;
  driver->failing = "cuLaunchKernelEx";
  driver->failure = 700;
  EXPECT_EQ(error_of(Status::runtime, [&] { forward(m.args); }),
            "cuLaunchKernelEx: CUDA_ERROR_FAKE (700): a failure made for a test");
}

TEST_F(FakeDriver, MisalignedTensorsArePackedIntoMemoryThatIsFreed) {
  Memory m;
  m.args.q.data = static_cast<char*>(m.q.data()) + 2;
  const int live = driver->live_allocations;
  driver->launches.clear();
  forward(m.args);
  ASSERT_EQ(driver->launches.size(), 2U);
  EXPECT_NE(driver->launches[0].symbol.find("pack"), std::string::npos);
  EXPECT_NE(driver->launches[1].symbol.find("forward"), std::string::npos);
  EXPECT_NE(driver->launches[1].params.q.opaque[0], reinterpret_cast<std::uintptr_t>(m.args.q.data));
  EXPECT_EQ(count("cuMemAllocAsync"), 1);
  EXPECT_EQ(driver->live_allocations, live);
}

TEST_F(FakeDriver, WithAWorkspaceNothingIsAllocated) {
  Memory m;
  m.args.q.data = static_cast<char*>(m.q.data()) + 2;
  Execution execution;
  execution.workspace_bytes = workspace_bytes(m.args);
  EXPECT_EQ(execution.workspace_bytes, static_cast<std::size_t>(Memory::elements) * 2);
  DeviceBuffer workspace(1, execution.workspace_bytes);
  execution.workspace = workspace.data();
  driver->calls.clear();
  driver->launches.clear();
  forward(m.args, execution);
  EXPECT_EQ(count("cuMemAllocAsync") + count("cuMemAlloc"), 0);
  EXPECT_EQ(driver->launches.at(1).params.q.opaque[0], reinterpret_cast<std::uintptr_t>(workspace.data()));
  execution.workspace_bytes -= 1;
  EXPECT_THROW(forward(m.args, execution), Error);
}

TEST_F(FakeDriver, NoMemoryIsOutOfMemoryAndLeavesNothingLaunched) {
  Memory m;
  m.args.q.data = static_cast<char*>(m.q.data()) + 2;
  forward(m.args);
  driver->launches.clear();
  driver->failing = "cuMemAllocAsync";
  driver->failure = abi::error_out_of_memory;
  EXPECT_TRUE(in_runbook("out-of-memory.md", error_of(Status::out_of_memory, [&] { forward(m.args); })));
  EXPECT_EQ(driver->launches.size(), 0U);
  const std::vector<ErrorStats> errors = stats().errors;
  EXPECT_NE(std::ranges::find(errors, "cuMemAllocAsync", &ErrorStats::rule), errors.end());
}

TEST_F(FakeDriver, CheckReadsLengthsFromTheDevice) {
  Memory m;
  const std::int32_t used[2] = {300, 301};
  DeviceBuffer lengths(1, sizeof(used));
  lengths.copy_from_host(used, sizeof(used));
  m.args.seqused_k = ConstTensor(lengths.data(), DType::i32, {2}, cuda);
  m.args.options.check = true;
  driver->launches.clear();
  EXPECT_THROW(forward(m.args), Error);
  EXPECT_EQ(driver->launches.size(), 0U);
  EXPECT_EQ(count("cuCtxSynchronize"), 1);
  EXPECT_EQ(count("cuMemcpyDtoH"), 1);
}

TEST_F(FakeDriver, DevicesThatDoNotExistAreNamed) {
  Memory m;
  for (ConstTensor* t : {&m.args.q, &m.args.k, &m.args.v}) t->device.index = 7;
  m.args.out.device.index = 7;
  const std::string error = error_of(Status::invalid_argument, [&] { forward(m.args); });
  EXPECT_NE(error.find("device index 7"), std::string::npos) << error;
}

TEST_F(FakeDriver, EverythingIsFreedInItsContext) {
  const int live = driver->live_allocations;
  driver->current.clear();  // no context is current: cuMemFree refuses then
  { const Memory m; }
  EXPECT_EQ(driver->live_allocations, live);
}

TEST_F(FakeDriver, IsDescribed) {
  const Description description = describe();
  EXPECT_EQ(description.driver, "CUDA 13.0");
  ASSERT_EQ(description.devices.size(), 2U);
  EXPECT_EQ(description.devices[0].name, "Fake H100");
  EXPECT_EQ(description.devices[0].capability, "9.0");
  EXPECT_TRUE(description.devices[0].supported);
}

}  // namespace
}  // namespace tandem::gpu
