// The host side of the GPU backend on a driver of our own (fake/): contexts, launches, packing, workspaces,
// errors.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "fake/fake_driver.hpp"
#include "gpu/backward_params.hpp"
#include "gpu/compiler.hpp"
#include "gpu/describe.hpp"
#include "gpu/device.hpp"
#include "gpu/kernel_name.hpp"
#include "gpu/kernels.hpp"
#include "plan/backward_plan.hpp"
#include "plan/eight_bit_plan.hpp"
#include "plan/forward_plan.hpp"
#include "plan/quantize_plan.hpp"
#include "tandem/attention.hpp"

namespace tandem::gpu {
namespace {

constexpr Device cuda{.kind = Device::Kind::cuda, .index = 1};
const auto other_context = reinterpret_cast<abi::Context>(0x77);

/// A call of (batch 2, rows 300, heads 4, head_dim 128) in bf16 on memory that the fake driver may read.
struct Memory {
  static constexpr std::int64_t elements = 2 * 300 * 4 * 128;
  DeviceBuffer q{1, elements * 2 + 256}, k{1, elements * 2}, v{1, elements * 2}, out{1, elements * 2};
  ForwardArgs args;

  Memory() {
    const auto tensor = [](const DeviceBuffer& b) {
      return Tensor(b.data(), DType::bf16, {2, 300, 4, 128}, cuda);
    };
    args.q = tensor(q);
    args.k = tensor(k);
    args.v = tensor(v);
    args.out = tensor(out);
  }
};

/// The Config of every call in this file.
ForwardConfig config_of_calls(bool causal = false) {
  Problem p;
  p.q.dtype = DType::bf16;
  if (causal) p.window_right = 0;
  p.head_dim_qk = p.head_dim_v = 128;
  p.rows_q = p.rows_k = 300;
  return choose_forward_config(p);
}

BackwardConfig backward_config_of_calls() {
  Problem p;
  p.pass = Pass::backward;
  p.q.dtype = DType::bf16;
  p.head_dim_qk = p.head_dim_v = 128;
  p.rows_q = p.rows_k = 300;
  return choose_backward_config(p);
}

/// The backward of that call, with a sink.
struct BackwardMemory : Memory {
  DeviceBuffer dout{1, elements * 2 + 256}, dq{1, elements * 2}, dk{1, elements * 2}, dv{1, elements * 2};
  DeviceBuffer lse{1, 2 * 300 * 4 * 4}, sink{1, 16}, dsink{1, 16};
  BackwardArgs backward;

  BackwardMemory() {
    static_cast<AttentionInputs&>(backward) = args;
    backward.out = args.out;
    const auto tensor = [](const DeviceBuffer& b) {
      return Tensor(b.data(), DType::bf16, {2, 300, 4, 128}, cuda);
    };
    backward.dout = tensor(dout);
    backward.dq = tensor(dq);
    backward.dk = tensor(dk);
    backward.dv = tensor(dv);
    backward.lse = Tensor(lse.data(), DType::f32, {2, 4, 300}, cuda);
    backward.sink = Tensor(sink.data(), DType::f32, {4}, cuda);
    backward.dsink = Tensor(dsink.data(), DType::f32, {4}, cuda);
  }
};

/// That call in 8 bits.
Problem eight_bit_problem_of_calls() {
  Problem p;
  p.q.dtype = DType::bf16;
  p.q.row_stride = p.k.row_stride = p.v.row_stride = 512;
  p.q.head_stride = p.k.head_stride = p.v.head_stride = 128;
  p.head_dim_qk = p.head_dim_v = 128;
  p.rows_q = p.rows_k = 300;
  return p;
}

/// Whether the machine has a driver, which would be found in place of the fake one.
bool has_real_driver() {
  static const bool found = dlopen("libcuda.so.1", RTLD_NOW) != nullptr;
  return found;
}

/// The fake driver, opened once the kernels are in memory: NVRTC looks for a driver itself, and would take
/// this one.
fake::Driver& open_fake_driver() {
  static fake::Driver& opened = []() -> fake::Driver& {
    for (const bool causal : {false, true}) find_kernel(kernel_name(config_of_calls(causal)));
    find_kernel(kernel_name(PackConfig{.paired = false}));
    const BackwardConfig backward = backward_config_of_calls();
    find_kernel(kernel_name(Kernel::backward, backward));
    for (const Kernel kernel :
         {Kernel::backward_preprocess, Kernel::backward_convert, Kernel::backward_sink}) {
      find_kernel(kernel_name(kernel, backward_rows_config(backward)));
    }
    const Problem quantized = eight_bit_problem_of_calls();
    const QuantizeConfig quantizer = choose_quantize_config(quantized, int8_recipe);
    find_kernel(kernel_name(Kernel::mean_of_keys, mean_config(quantizer)));
    find_kernel(kernel_name(Kernel::quantize, quantizer));
    find_kernel(kernel_name(choose_eight_bit_config(quantized, int8_recipe)));
    void* library = dlopen(TANDEM_FAKE_DRIVER, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    return *reinterpret_cast<fake::Driver* (*)()>(dlsym(library, "fake_driver_state"))();
  }();
  return opened;
}

class FakeDriver : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
    if (has_real_driver()) GTEST_SKIP() << "this machine has a driver of its own";
    driver = &open_fake_driver();
    *driver = {};
    driver->current = {other_context};
  }
  [[nodiscard]] std::ptrdiff_t count(const char* call) const {
    return std::ranges::count(driver->calls, call);
  }

  fake::Driver* driver = nullptr;
};

TEST_F(FakeDriver, ACallIsOneLaunchOnTheCallersStream) {
  Memory m;
  forward(m.args);  // compiles and loads
  driver->calls.clear();
  driver->launches.clear();
  const auto stream = reinterpret_cast<abi::Stream>(0x555);
  forward(m.args, {.stream = stream});
  EXPECT_EQ(driver->calls, (std::vector<std::string>{"cuTensorMapEncodeTiled", "cuTensorMapEncodeTiled",
                                                     "cuTensorMapEncodeTiled", "cuLaunchKernelEx"}));
  ASSERT_EQ(driver->launches.size(), 1U);
  const fake::Launch& launch = driver->launches[0];
  EXPECT_EQ(launch.config.stream, stream);
  EXPECT_EQ(launch.attributes.size(), 0U);
  EXPECT_EQ(launch.params.out, m.out.data());
  EXPECT_EQ(launch.params.q.opaque[0], reinterpret_cast<std::uintptr_t>(m.q.data()));
  EXPECT_EQ(launch.params.heads_q, 4);
  const ForwardConfig config = config_of_calls();
  const int tiles = 2 * 4 * ((300 + config.block_m - 1) / config.block_m);
  EXPECT_EQ(launch.config.grid_x, static_cast<unsigned>(std::min(tiles, 132)));
  EXPECT_EQ(launch.config.block_x, static_cast<unsigned>(config.threads()));
  EXPECT_EQ(launch.config.shared_bytes, static_cast<unsigned>(forward_shared_bytes(config)));
}

TEST_F(FakeDriver, TilesAreDrawnFromACounterOnlyWhereBlocksAreFewer) {
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
  try {
    forward(m.args);
    FAIL() << "a failed launch went unnoticed";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::runtime);
    EXPECT_STREQ(e.what(), "cuLaunchKernelEx: CUDA_ERROR_FAKE (700): a failure made for a test");
  }
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
  try {
    forward(m.args);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::out_of_memory);
  }
  EXPECT_EQ(driver->launches.size(), 0U);
}

TEST_F(FakeDriver, EmptyCallsLaunchNothing) {
  Memory m;
  for (ConstTensor* t : {&m.args.q, &m.args.k, &m.args.v}) t->shape[0] = 0;
  m.args.out.shape[0] = 0;
  driver->launches.clear();
  forward(m.args);
  EXPECT_EQ(driver->launches.size(), 0U);
}

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
            2U * 4U * static_cast<unsigned>((299 + config.block_m) / config.block_m));
  EXPECT_EQ(driver->launches[2].config.grid_x,
            2U * 4U * static_cast<unsigned>((299 + config.block_n) / config.block_n));
  EXPECT_EQ(driver->launches[2].config.shared_bytes, static_cast<unsigned>(backward_shared_bytes(config)));
  EXPECT_EQ(count("cuMemAllocAsync") + count("cuMemAlloc"), 0);
  execution.workspace_bytes -= 1;
  EXPECT_THROW(backward(m.backward, execution), Error);
}

TEST_F(FakeDriver, GradientsThatNobodyWantsAreNotConvertedAndTakeLittleMemory) {
  BackwardMemory m;
  const std::size_t all = workspace_bytes(m.backward);
  const auto launched = [&] {
    driver->launches.clear();
    backward(m.backward);
    std::vector<std::string> kernels;
    for (const fake::Launch& launch : driver->launches) {
      for (const char* kernel : {"backward_preprocess", "backwardIX", "backward_convert", "backward_sink"}) {
        if (launch.symbol.find(kernel) != std::string::npos) kernels.emplace_back(kernel);
      }
    }
    return kernels;
  };
  using Kernels = std::vector<std::string>;
  m.backward.dq = {};
  EXPECT_EQ(launched(), (Kernels{"backward_preprocess", "backwardIX", "backward_sink"}));
  EXPECT_EQ(workspace_bytes(m.backward), all);
  m.backward.dk = {};  // the kernel writes one head's rows of it to the workspace
  EXPECT_EQ(launched(), (Kernels{"backward_preprocess", "backwardIX", "backward_sink"}));
  EXPECT_EQ(workspace_bytes(m.backward), all + 300 * 128 * 2);
  m.backward.dv = {};
  EXPECT_EQ(launched(), (Kernels{"backward_preprocess", "backward_sink"}));
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

TEST_F(FakeDriver, ACallInEightBitsIsThreeLaunchesInAWorkspaceOfItsOwn) {
  Memory m;
  m.args.options.precision = Precision::int8;
  Execution execution{.stream = reinterpret_cast<void*>(0x555)};
  execution.workspace_bytes = workspace_bytes(m.args);
  // Codes take half the room of 16 bits; scales by row, sums and means some more.
  EXPECT_GT(execution.workspace_bytes, static_cast<std::size_t>(Memory::elements) * 3);
  EXPECT_LT(execution.workspace_bytes, static_cast<std::size_t>(Memory::elements) * 5);
  const DeviceBuffer workspace(1, execution.workspace_bytes);
  execution.workspace = workspace.data();
  driver->calls.clear();
  driver->launches.clear();
  forward(m.args, execution);
  const std::vector<const char*> kernels = {"mean_of_keys", "quantizeIX", "eight_bit_forward"};
  ASSERT_EQ(driver->launches.size(), kernels.size());
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    const fake::Launch& launch = driver->launches[i];
    EXPECT_NE(launch.symbol.find(kernels[i]), std::string::npos) << launch.symbol;
    EXPECT_EQ(launch.config.stream, execution.stream);
    // The later ones may start while what is before them ends.
    EXPECT_EQ(launch.attributes.size(), i > 0 ? 1U : 0U) << launch.symbol;
  }
  EXPECT_EQ(driver->launches[0].config.grid_x, 2U * 4U * 3U);
  EXPECT_EQ(driver->launches[1].config.grid_x, 3U * 2U * 4U * 3U);
  EXPECT_EQ(count("cuMemAllocAsync") + count("cuMemAlloc"), 0);
  const std::string text = explain(m.args);
  EXPECT_NE(text.find("eight_bit_forward"), std::string::npos) << text;
  EXPECT_NE(text.find("precision int8: Q K^T in s8"), std::string::npos) << text;
  execution.workspace_bytes -= 1;
  EXPECT_THROW(forward(m.args, execution), Error);
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
  try {
    forward(m.args);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::invalid_argument);
    EXPECT_NE(std::string(e.what()).find("device index 7"), std::string::npos) << e.what();
  }
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
