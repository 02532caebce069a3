// Calls where nothing compiles for the GPU: the kernels are the shipped set's portable ones. On the driver of
// our own (fake/), as a GPU of compute capability 12.0, without NVRTC, with an archive that is made here.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "fake/fake_driver.hpp"
#include "gpu/describe.hpp"
#include "gpu/device.hpp"
#include "gpu/kernels.hpp"
#include "gpu/launch.hpp"
#include "gpu/shipped.hpp"
#include "harness/error_of.hpp"
#include "harness/runbook.hpp"
#include "ops/cache/launch.hpp"
#include "ops/portable_set.hpp"
#include "tandem/attention.hpp"
#include "tandem/log.hpp"
#include "tandem/stats.hpp"

namespace tandem::gpu {
namespace {

constexpr const char* ptx = ".version 9.0\n.target sm_80\n.address_size 64\n";

/// The portable set, each kernel of one text and of the symbol that its name suggests; and a kernel compiled
/// for this GPU, for a driver that refuses it.
const std::string& archive() {
  static const std::string bytes = [] {
    std::string made;
    for (const KernelName& name : portable_kernels()) {
      const std::string text = ptx + std::string(1, '\0');
      const std::string symbol = name.expression.substr(0, name.expression.find('<'));
      append_shipped(made, name, {.image = {text.begin(), text.end()}, .symbol = symbol, .usage = {}});
    }
    KernelName compiled = kernels::merge.name(MergeConfig{.from = Stored::f16, .to = Stored::f16});
    compiled.architecture = "sm_120";
    append_shipped(made, compiled, {.image = {'\x7f', 'E', 'L', 'F'}, .symbol = "merge", .usage = {}});
    return made;
  }();
  return bytes;
}

}  // namespace

std::size_t bytes_lost = 0;  ///< at the archive's end

/// In the place of the library's own, which is weak.
std::span<const char> shipped_archive() {
  return {archive().data(), archive().size() - bytes_lost};
}

namespace {

TEST(ShippedArchive, ADamagedOneServesWhatIsWholeAndTheLogTells) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own, since one reads its archive once
  const auto read_damaged = [] {
    bytes_lost = 10;
    set_log(LogLevel::info, [](LogLevel, const char* message) { std::fputs(message, stderr); });
    std::exit(shipped_kernels() == portable_kernels().size() ? 0 : 1);
  };
  EXPECT_EXIT(read_damaged(), testing::ExitedWithCode(0),
              "the shipped kernels are damaged behind the first [0-9]+; reinstall Tandem");
}

constexpr int small = 0;  ///< the device with too little shared memory
constexpr int usual = 1;

fake::Driver& open_fake_driver() {
  static fake::Driver& opened = []() -> fake::Driver& {
    setenv("TANDEM_NVRTC", "/nonexistent/libnvrtc.so.13", 1);
    void* library = dlopen(TANDEM_FAKE_DRIVER, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    return *reinterpret_cast<fake::Driver* (*)()>(dlsym(library, "fake_driver_state"))();
  }();
  return opened;
}

class FakeDriverPortable : public testing::Test {
 protected:
  void SetUp() override {
    static const bool has_driver = dlopen("libcuda.so.1", RTLD_NOW) != nullptr;
    if (has_driver) GTEST_SKIP() << "this machine has a driver of its own";
    driver = &open_fake_driver();
    *driver = {};
    driver->major = 12;
    driver->shared_bytes = {48 << 10, 99 << 10};
  }
  fake::Driver* driver = nullptr;
};

/// A call on memory that nothing reads.
struct Call {
  static constexpr std::int64_t keys = 8192;
  std::int64_t heads_q, head_dim;
  int device;
  DeviceBuffer q, k, out;
  ForwardArgs args;

  explicit Call(std::int64_t rows, std::int64_t heads, std::int64_t dim, int index = usual)
      : heads_q(heads),
        head_dim(dim),
        device(index),
        q(index, bytes(rows)),
        k(index, bytes(keys)),
        out(index, bytes(rows)) {
    args.q = tensor(q, rows);
    args.k = args.v = tensor(k, keys, 2);
    args.out = tensor(out, rows);
  }
  [[nodiscard]] std::size_t bytes(std::int64_t rows) const {
    return static_cast<std::size_t>(2 * rows * heads_q * head_dim * 2);
  }
  [[nodiscard]] Tensor tensor(const DeviceBuffer& memory, std::int64_t rows, std::int64_t heads = 0) const {
    return Tensor(memory.data(), DType::bf16, {2, rows, heads > 0 ? heads : heads_q, head_dim},
                  {.kind = Device::Kind::cuda, .index = device});
  }
};

std::vector<std::string> symbols(const fake::Driver& driver) {
  std::vector<std::string> found;
  for (const fake::Launch& launch : driver.launches) found.push_back(launch.symbol);
  return found;
}

std::string error_of(const ForwardArgs& args, Status status) {
  return tandem::error_of(status, [&] { forward(args); });
}

TEST_F(FakeDriverPortable, ACallTakesTheShippedPtx) {
  const Call call(300, 4, 96);
  forward(call.args);
  EXPECT_EQ(symbols(*driver), std::vector<std::string>{"tandem::sm80_forward"});
  ASSERT_FALSE(driver->images.empty());
  EXPECT_STREQ(driver->images.front(), ptx);
  // 96 dimensions take the tile of 128.
  EXPECT_EQ(driver->launches[0].params.head_dim_qk, 96);
  const std::string text = explain(call.args);
  for (const char* line : {"kernels sm80, portable: PTX of compute_80 that the driver compiles, since "
                           "TANDEM_NVRTC=/nonexistent/libnvrtc.so.13 cannot be opened",
                           "head_dim 96 and head_dim_v 96 padded to 128", "what 100 KB an SM hold"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
  }
}

/// Its instructions have no griddepcontrol: `combine` would read what is not written yet.
TEST_F(FakeDriverPortable, NoKernelStartsBeforeTheOneBeforeItHasEnded) {
  const Call call(1, 8, 64);
  forward(call.args);
  EXPECT_EQ(symbols(*driver), (std::vector<std::string>{"tandem::sm80_forward", "tandem::combine"}));
  for (const fake::Launch& launch : driver->launches)
    EXPECT_EQ(launch.attributes.size(), 0U) << launch.symbol;
}

TEST_F(FakeDriverPortable, ABackwardCallTakesIt) {
  const Call call(256, 2, 64);
  const DeviceBuffer lse(usual, 2 * 2 * 256 * 4);
  const DeviceBuffer gradients(usual, call.bytes(256));
  BackwardArgs args;
  static_cast<AttentionInputs&>(args) = call.args;
  args.out = args.dout = call.args.out;
  args.lse = ConstTensor(lse.data(), DType::f32, {2, 2, 256}, call.args.q.device);
  args.dq = call.tensor(gradients, 256);
  backward(args);
  EXPECT_EQ(symbols(*driver),
            (std::vector<std::string>{"tandem::backward_preprocess", "tandem::sm80_backward",
                                      "tandem::backward_convert"}));
  for (const fake::Launch& launch : driver->launches)
    EXPECT_EQ(launch.attributes.size(), 0U) << launch.symbol;
  EXPECT_NE(explain(args).find("kernel sm80_backward: bf16, every mask"), std::string::npos);
}

TEST_F(FakeDriverPortable, TheLogTheCountersAndTheDescriptionSaySo) {
  static std::string logged;
  set_log(LogLevel::info, [](LogLevel, const char* text) { logged += text; });
  const Call call(300, 4, 256);
  forward(call.args);
  set_log(LogLevel::off, nullptr);
  EXPECT_NE(logged.find("shipped as PTX, which the driver compiles,"), std::string::npos) << logged;
  const Stats counted = stats();
  EXPECT_NE(std::ranges::find(counted.calls, "portable", &CallStats::family), counted.calls.end());
  EXPECT_NE(std::ranges::find(counted.kernels, "portable", &KernelStats::origin), counted.kernels.end());
  const Description description = describe();
  ASSERT_EQ(description.devices.size(), 2U);
  EXPECT_EQ(description.devices[1].kernels, "sm80");
  EXPECT_NE(description.devices[1].portable.find("cannot be opened"), std::string::npos);
}

TEST_F(FakeDriverPortable, WhatTheSetLacksIsAnErrorThatSaysWhatWould) {
  Call call(300, 4, 64);
  call.args.options.softcap = 30;
  EXPECT_EQ(error_of(call.args, Status::unsupported)
                .find("TANDEM_NVRTC=/nonexistent/libnvrtc.so.13 cannot be opened"),
            0U);
  EXPECT_TRUE(in_runbook("no-kernel.md", error_of(call.args, Status::unsupported)));
  EXPECT_EQ(driver->launches.size(), 0U);
}

TEST_F(FakeDriverPortable, ADriverTooOldForThePtxIsNamed) {
  Call call(300, 4, 128);
  call.args.q.dtype = call.args.k.dtype = call.args.v.dtype = call.args.out.dtype = DType::f16;
  driver->failing = "cuModuleLoadData";
  driver->failure = abi::error_unsupported_ptx_version;
  const std::string error = error_of(call.args, Status::unsupported);
  EXPECT_EQ(
      error,
      "the NVIDIA driver of cuda:1 is for CUDA 13.0, too old for PTX 9.0, which the portable kernels are; "
      "update the driver, or install an NVRTC of its version that knows sm_120 (pip install "
      "nvidia-cuda-nvrtc-cu12 for CUDA 12)");
  EXPECT_TRUE(in_runbook("no-kernel.md", error));
  EXPECT_EQ(driver->launches.size(), 0U);
  forward(call.args);  // the refusal is not remembered
  EXPECT_EQ(driver->launches.size(), 1U);
}

/// As from a cache whose files were written over: the driver alone can tell.
TEST_F(FakeDriverPortable, AnImageForAnotherGpuIsNamed) {
  KernelName name = kernels::merge.name(MergeConfig{.from = Stored::f16, .to = Stored::f16});
  name.architecture = "sm_120";
  for (const abi::Result refusal : {abi::error_no_binary_for_gpu, abi::error_invalid_image}) {
    driver->failing = "cuModuleLoadData";
    driver->failure = refusal;
    const std::string text = tandem::error_of(Status::runtime, [&] { load_kernel(usual, name, 0); });
    EXPECT_EQ(text.find("cuda:1 cannot load tandem::merge<"), 0U) << text;
    EXPECT_NE(
        text.find("compiled for sm_120: its image is damaged, or for another GPU; remove the kernel cache "),
        std::string::npos)
        << text;
  }
  EXPECT_FALSE(load_kernel(usual, name, 0).portable);
}

TEST_F(FakeDriverPortable, AGpuWithLessSharedMemoryThanTheTableExpectsIsNamed) {
  const Call call(300, 4, 128, small);
  const std::string error = error_of(call.args, Status::unsupported);
  EXPECT_NE(
      error.find("bytes of shared memory, which compute capability 12.0 is expected to have; Fake H100 has "
                 "49152; copy the tensors to the CPU"),
      std::string::npos)
      << error;
  EXPECT_EQ(driver->launches.size(), 0U);
}

}  // namespace
}  // namespace tandem::gpu
