// The instructions on a GPU and in the emulator: the same kernel must write the same bytes. With
// TANDEM_RECORD_TRUTH=FILE the GPU's are written to FILE, for machines without one.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string_view>

#include "gpu/compiler.hpp"
#include "gpu/device.hpp"
#include "gpu/launch.hpp"
#include "gpu/tensor_map.hpp"
#include "gpu_runner.hpp"
#include "hardware_truth.hpp"
#include "hardware_truth_source.hpp"
#include "launch.hpp"

namespace tandem::gpu {
namespace {

using kernel_tests::TruthInputs;
using kernel_tests::TruthParams;

CompiledKernel compile_truth() {
  std::vector<Source> sources(device_sources().begin(), device_sources().end());
  sources.push_back({"hardware_truth.cuh", kernel_tests::hardware_truth_source});
  return compile({.header = "hardware_truth.cuh", .expression = "tandem::kernel_tests::hardware_truth"},
                 sources);
}

template <typename T>
DeviceBuffer on_device(const std::vector<T>& host) {
  DeviceBuffer buffer(0, host.size() * sizeof(T));
  buffer.copy_from_host(host.data(), buffer.bytes());
  return buffer;
}

std::vector<unsigned char> run_on_gpu(const TruthInputs& in) {
  const ContextGuard guard(0);
  const CompiledKernel compiled = compile_truth();
  const DeviceBuffer bf16 = on_device(in.bf16);
  const DeviceBuffer f16 = on_device(in.f16);
  const DeviceBuffer numbers = on_device(in.numbers);
  std::vector<unsigned char> results = kernel_tests::blank_truth();
  const DeviceBuffer out = on_device(results);

  LoadedKernel kernel{.function = nullptr, .shared_bytes = sizeof(kernel_tests::TruthShared)};
  abi::Module module = nullptr;
  check(driver().module_load_data(&module, compiled.cubin.data()), "cuModuleLoadData");
  check(driver().module_get_function(&kernel.function, module, compiled.symbol.c_str()),
        "cuModuleGetFunction");
  check(driver().function_set_attribute(
            kernel.function, abi::FunctionAttribute::max_dynamic_shared_size_bytes, kernel.shared_bytes),
        "cuFuncSetAttribute");
  const TruthParams params =
      kernel_tests::truth_params({bf16.data(), f16.data(), numbers.data(), out.data()}, &encode_tensor_map);
  launch(kernel, {.grid = 1, .threads = kernel_tests::truth_threads}, &params);
  out.copy_to_host(results.data(), results.size());
  synchronize(0);
  return results;
}

std::vector<unsigned char> run_in_emulator(TruthInputs& in) {
  std::vector<unsigned char> results = kernel_tests::blank_truth();
  emulator::Options options;
  options.buffers = {emulator::readable(in.bf16), emulator::readable(in.f16), emulator::readable(in.numbers),
                     emulator::writable(results)};
  const TruthParams params = kernel_tests::truth_params(
      {in.bf16.data(), in.f16.data(), in.numbers.data(), results.data()}, &emulator::encode);
  emulator::launch(
      &kernel_tests::hardware_truth, params,
      {.threads = kernel_tests::truth_threads, .shared_bytes = sizeof(kernel_tests::TruthShared)}, options);
  return results;
}

TEST(HardwareTruth, TheKernelCompiles) {
  if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  const CompiledKernel kernel = compile_truth();
  EXPECT_FALSE(kernel.cubin.empty());
  EXPECT_EQ(kernel.usage.spill_store_bytes, 0);
}

TEST(HardwareTruth, TheEmulatorDoesWhatTheGpuDoes) {
  if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  TruthInputs in = kernel_tests::truth_inputs();
  const std::vector<unsigned char> gpu = run_on_gpu(in);
  const std::vector<unsigned char> emulated = run_in_emulator(in);
  if (const char* file = std::getenv("TANDEM_RECORD_TRUTH")) {
    const std::vector<unsigned char> packed = kernel_tests::pack_truth(gpu);
    std::ofstream(file, std::ios::binary)
        .write(reinterpret_cast<const char*>(packed.data()), static_cast<std::streamsize>(packed.size()));
  }
  ASSERT_EQ(gpu.size(), emulated.size());
  int wrong = 0;
  for (std::size_t i = 0; i < gpu.size() && wrong < 20; ++i) {
    if (gpu[i] == emulated[i]) continue;
    ++wrong;
    ADD_FAILURE() << "byte " << i << " (word " << i / 4 << "): gpu " << int{gpu[i]} << ", emulator "
                  << int{emulated[i]};
  }
}

}  // namespace
}  // namespace tandem::gpu
