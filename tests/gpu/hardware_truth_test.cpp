// The instructions on a GPU and in the emulator: the same kernel must write the same bytes. A test a section,
// since an instruction that faults ends the process's context: run them one a process (ctest does) to see
// which sections are sound. With TANDEM_RECORD_TRUTH=FILE the GPU's bytes are written to FILE, for machines
// without one.
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

namespace tandem::kernel_tests {

void PrintTo(TruthSection section, std::ostream* out) {
  *out << name_of(section);
}

}  // namespace tandem::kernel_tests

namespace tandem::gpu {
namespace {

using kernel_tests::TruthInputs;
using kernel_tests::TruthParams;
using kernel_tests::TruthSection;

CompiledKernel compile_truth() {
  std::vector<Source> sources(device_sources().begin(), device_sources().end());
  for (const auto& [name, text] : kernel_tests::truth_sources) sources.push_back({name, text});
  return compile({.header = "hardware_truth.cuh", .expression = "tandem::kernel_tests::hardware_truth"},
                 sources);
}

template <typename T>
DeviceBuffer on_device(const std::vector<T>& host) {
  DeviceBuffer buffer(0, host.size() * sizeof(T));
  buffer.copy_from_host(host.data(), buffer.bytes());
  return buffer;
}

constexpr TruthSection section_at(int i) {
  return static_cast<TruthSection>(i);
}

/// What sections [first, last] write.
std::vector<unsigned char> run_on_gpu(const TruthInputs& in, TruthSection first, TruthSection last) {
  const ContextGuard guard(0);
  const CompiledKernel compiled = compile_truth();
  const DeviceBuffer bf16 = on_device(in.bf16);
  const DeviceBuffer f16 = on_device(in.f16);
  const DeviceBuffer numbers = on_device(in.numbers);
  std::vector<unsigned char> results = kernel_tests::blank_truth();
  const DeviceBuffer out = on_device(results);

  LoadedKernel kernel{.function = nullptr, .shared_bytes = sizeof(kernel_tests::TruthShared)};
  abi::Module module = nullptr;
  check(driver().module_load_data(&module, compiled.image.data()), "cuModuleLoadData");
  check(driver().module_get_function(&kernel.function, module, compiled.symbol.c_str()),
        "cuModuleGetFunction");
  check(driver().function_set_attribute(
            kernel.function, abi::FunctionAttribute::max_dynamic_shared_size_bytes, kernel.shared_bytes),
        "cuFuncSetAttribute");
  TruthParams params =
      kernel_tests::truth_params({bf16.data(), f16.data(), numbers.data(), out.data()}, &encode_tensor_map);
  for (int i = static_cast<int>(first); i <= static_cast<int>(last); ++i) {
    params.section = section_at(i);
    const auto ctas = static_cast<unsigned int>(kernel_tests::truth_ctas(params.section));
    launch(kernel, {.grid = ctas, .threads = kernel_tests::truth_threads, .cluster = ctas}, &params);
    synchronize(0);
  }
  out.copy_to_host(results.data(), results.size());
  synchronize(0);
  return results;
}

std::vector<unsigned char> run_in_emulator(TruthInputs& in, TruthSection section) {
  std::vector<unsigned char> results = kernel_tests::blank_truth();
  emulator::Options options;
  options.buffers = {emulator::readable(in.bf16), emulator::readable(in.f16), emulator::readable(in.numbers),
                     emulator::writable(results)};
  TruthParams params = kernel_tests::truth_params(
      {in.bf16.data(), in.f16.data(), in.numbers.data(), results.data()}, &emulator::encode);
  params.section = section;
  const auto ctas = static_cast<unsigned>(kernel_tests::truth_ctas(section));
  emulator::launch(&kernel_tests::hardware_truth, params,
                   {.blocks = ctas,
                    .threads = kernel_tests::truth_threads,
                    .shared_bytes = sizeof(kernel_tests::TruthShared),
                    .cluster = ctas},
                   options);
  return results;
}

TEST(HardwareTruth, TheKernelCompiles) {
  if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  const CompiledKernel kernel = compile_truth();
  EXPECT_FALSE(kernel.image.empty());
  EXPECT_EQ(kernel.usage.spill_store_bytes, 0);
}

class HardwareTruthSection : public testing::TestWithParam<TruthSection> {};

TEST_P(HardwareTruthSection, TheEmulatorDoesWhatTheGpuDoes) {
  if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  TruthInputs in = kernel_tests::truth_inputs();
  const std::vector<unsigned char> gpu = run_on_gpu(in, GetParam(), GetParam());
  const std::vector<unsigned char> emulated = run_in_emulator(in, GetParam());
  ASSERT_EQ(gpu.size(), emulated.size());
  int wrong = 0;
  for (std::size_t i = 0; i < gpu.size() && wrong < 20; ++i) {
    if (gpu[i] == emulated[i]) continue;
    ++wrong;
    ADD_FAILURE() << "byte " << i << " (word " << i / 4 << "): gpu " << int{gpu[i]} << ", emulator "
                  << int{emulated[i]};
  }
}

std::vector<TruthSection> all_sections() {
  std::vector<TruthSection> sections;
  for (int i = 0; i < kernel_tests::truth_sections; ++i) sections.push_back(section_at(i));
  return sections;
}

INSTANTIATE_TEST_SUITE_P(HardwareTruth, HardwareTruthSection, testing::ValuesIn(all_sections()),
                         [](const auto& section) { return std::string(name_of(section.param)); });

TEST(HardwareTruth, IsRecorded) {
  const char* file = std::getenv("TANDEM_RECORD_TRUTH");
  if (file == nullptr) GTEST_SKIP() << "TANDEM_RECORD_TRUTH names no file";
  if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  const std::vector<unsigned char> packed = kernel_tests::pack_truth(
      run_on_gpu(kernel_tests::truth_inputs(), section_at(0), section_at(kernel_tests::truth_sections - 1)));
  std::ofstream out(file, std::ios::binary);
  out.write(reinterpret_cast<const char*>(packed.data()), static_cast<std::streamsize>(packed.size()));
  EXPECT_TRUE(out.good());
}

}  // namespace
}  // namespace tandem::gpu
