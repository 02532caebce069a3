// How long kernels with functions of the caller's stay loaded, of which there may be any number. What is
// "compiled" lies in a cache on the disk, so that nothing is.
#include <cstdlib>
#include <filesystem>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "driver_fixture.hpp"
#include "gpu/cache.hpp"
#include "gpu/launch.hpp"
#include "harness/temporary_folder.hpp"
#include "ops/forward/launch.hpp"

namespace tandem::gpu {
namespace {

class FunctionKernels : public FakeDriver {
 protected:
  void SetUp() override {
    FakeDriver::SetUp();
    if (IsSkipped()) return;
    setenv("TANDEM_CACHE_DIR", directory.c_str(), 1);
    driver->calls.clear();
  }
  void TearDown() override { unsetenv("TANDEM_CACHE_DIR"); }

  /// The Config of the `n`-th function, whose kernel is then on the disk.
  ForwardConfig on_disk(int n) const {
    return on_disk({.digest = static_cast<unsigned long long>(n) + 1, .score_function = true}, function);
  }
  ForwardConfig on_disk(const Functions& functions, const Function& score) const {
    ForwardConfig config = config_of_calls();
    config.functions = functions;
    KernelName name = kernels::forward.name(config);
    name.architecture = architecture_of(properties(1));
    name.functions = function_source({.score = &score});
    DiskCache(directory).store(cache_key(name, compiler()),
                               {.image = {'\x7f', 'E', 'L', 'F'}, .symbol = "forward", .usage = {}});
    return config;
  }
  LoadedKernel load(int n) const {
    return loaded_kernel(1, kernels::forward, on_disk(n), {.score = &function});
  }

  const Function function = Function::parse("add(s, 1.0)", Function::Kind::score);
  harness::TemporaryFolder temporary;
  const std::filesystem::path& directory = temporary.path();
};

constexpr int most = static_cast<int>(most_function_kernels);

TEST_F(FunctionKernels, TheOldestAreUnloadedAndThoseInUseAreNot) {
  const LoadedKernel held = load(0);
  driver->capturing = true;
  launch(load(1), {.stream = reinterpret_cast<abi::Stream>(0x555)}, &held);
  driver->capturing = false;
  launch(load(2), {}, &held);
  for (int n = 3; n < most; ++n) load(n);
  load(3);  // is then the one that was asked for last
  EXPECT_EQ(count("cuModuleUnload"), 0);
  driver->calls.clear();
  load(most);
  EXPECT_EQ(count("cuModuleUnload"), most / 4);
  EXPECT_EQ(count("cuCtxSynchronize"), 1) << "launches of what is unloaded may still run";
  EXPECT_EQ(driver->current, std::vector{other_context});
  driver->calls.clear();
  for (const int kept : {0, 1, 3, most - 1, most}) load(kept);
  EXPECT_EQ(count("cuModuleLoadData"), 0) << "held, captured, and used of late";
  for (const int gone : {2, 4, 5}) load(gone);
  EXPECT_EQ(count("cuModuleLoadData"), 3);
  for (int n = 0; n < 3 * most; ++n) load(1000 + n);
  EXPECT_LT(count("cuModuleLoadData") - count("cuModuleUnload"), most);
}

TEST_F(FunctionKernels, ADeviceThatCannotBeWaitedForKeepsThem) {
  for (int n = 0; n < 2 * most; ++n) {
    driver->failing = "cuCtxSynchronize";
    driver->failure = 900;  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    load(5000 + n);
  }
  EXPECT_EQ(count("cuModuleUnload"), 0);
  driver->failing.clear();
  load(9000);
  EXPECT_EQ(count("cuModuleUnload"), most / 4);
}

/// As of a number that changes in each step of a training.
TEST_F(FunctionKernels, OtherNumbersLoadNoOther) {
  const auto load_of = [this](const char* text) {
    const Function f = Function::parse(text, Function::Kind::score);
    const Functions functions = functions_config({.score = &f});
    loaded_kernel(1, kernels::forward, on_disk(functions, f), {.score = &f});
    return functions.digest;
  };
  const auto first = load_of("mul(s, 0.37)");
  EXPECT_EQ(count("cuModuleLoadData"), 1);
  EXPECT_EQ(load_of("mul(s, 0.38)"), first);
  EXPECT_EQ(load_of("mul(s, -1e-3)"), first);
  EXPECT_EQ(count("cuModuleLoadData"), 1);
  EXPECT_NE(load_of("mul(s, 1.0)"), first);
  EXPECT_EQ(count("cuModuleLoadData"), 2);
}

TEST_F(FunctionKernels, ThreadsThatLoadOneAtOnceLoadItOnce) {
  for (int n = 20000; n < 20020; ++n) {
    const ForwardConfig config = on_disk(n);
    const std::ptrdiff_t before = count("cuModuleLoadData");
    std::promise<void> go;
    const std::shared_future<void> started = go.get_future().share();
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        started.wait();
        loaded_kernel(1, kernels::forward, config, {.score = &function});
      });
    }
    go.set_value();
    threads.clear();
    EXPECT_EQ(count("cuModuleLoadData") - before, 1);
  }
}

}  // namespace
}  // namespace tandem::gpu
