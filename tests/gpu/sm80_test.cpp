// The kernels of the family sm80, compiled for every architecture that takes them: none may have local
// memory.
#include <gtest/gtest.h>

#include "gpu/compiler.hpp"
#include "gpu/kernel_spec.hpp"
#include "gpu/kernels.hpp"
#include "kernel_sample.hpp"
#include "ops/backward/launch.hpp"
#include "ops/backward/sm80_plan.hpp"
#include "ops/cache/launch.hpp"
#include "ops/forward/launch.hpp"
#include "ops/forward/plan.hpp"
#include "ops/forward/sm80_plan.hpp"
#include "ops/pack/launch.hpp"

namespace tandem::gpu {
namespace {

struct Architecture {
  std::size_t number;  ///< from architecture to architecture another third of the kernels is compiled
  const char* name;
  int shared_kilobytes;  ///< of an SM
};

class Sm80 : public testing::TestWithParam<Architecture> {};

/// Of a kernel, compiled for the architecture.
void expect_no_local_memory(KernelName name, const Architecture& architecture) {
  name.architecture = architecture.name;
  SCOPED_TRACE(name.expression);
  const KernelUsage usage = find_kernel(name).kernel->usage;
  EXPECT_GT(usage.registers, 0);
  EXPECT_EQ(usage.stack_bytes, 0);
  EXPECT_EQ(usage.spill_store_bytes, 0);
  EXPECT_EQ(usage.spill_load_bytes, 0);
}

TEST_P(Sm80, HasNoLocalMemory) {
  if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  const int shared = GetParam().shared_kilobytes * 1024;
  std::size_t number = GetParam().number;
  for (const Sm80ForwardConfig& config : sm80_forward_configs(shared)) {
    ASSERT_EQ(forward_objection(config, shared), "") << expression_of(config);
    if (!is_in_sample(number++, 3)) continue;
    expect_no_local_memory(kernel_of(config).name(config), GetParam());
  }
}

TEST_P(Sm80, BackwardHasNoLocalMemory) {
  if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  const int shared = GetParam().shared_kilobytes * 1024;
  std::size_t number = GetParam().number;
  for (const Sm80BackwardConfig& config : sm80_backward_configs(shared)) {
    ASSERT_EQ(backward_objection(config, shared), "") << expression_of(config);
    if (!is_in_sample(number++, 3)) continue;
    expect_no_local_memory(kernel_of(config).name(config), GetParam());
    if (config.transform == ScoreTransform::raw) continue;
    for (const KernelSpec* beside :
         {&kernels::backward_preprocess, &kernels::backward_convert, &kernels::backward_sink})
      expect_no_local_memory(beside->name(backward_rows_config(config)), GetParam());
  }
}

/// What a call may launch beside it. `combine` is held to 80 registers, which suits Hopper: on sm_100 and
/// sm_120 two words of a row are in local memory.
TEST_P(Sm80, HasTheKernelsThatAllGpusShare) {
  if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  Sm80ForwardConfig split;
  for (const Sm80ForwardConfig& config : sm80_forward_configs(GetParam().shared_kilobytes * 1024)) {
    if (config.schedule.split) split = config;
  }
  ASSERT_TRUE(split.schedule.split);
  const KernelName combine = kernels::combine.name(combine_config(split));
  for (KernelName name :
       {kernels::pack.name(PackConfig{}), kernels::pack.name(PackConfig{.paired = true}),
        kernels::append.name(AppendConfig{}), kernels::merge.name(MergeConfig{}), combine}) {
    const int most = name == combine ? 8 : 0;
    name.architecture = GetParam().name;
    SCOPED_TRACE(name.expression);
    EXPECT_LE(find_kernel(name).kernel->usage.stack_bytes, most);
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, Sm80,
                         testing::Values(Architecture{0, "sm_80", 164}, Architecture{1, "sm_86", 100},
                                         Architecture{2, "sm_89", 100}, Architecture{3, "sm_90a", 228},
                                         Architecture{4, "sm_100", 228}, Architecture{5, "sm_120", 100}),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

}  // namespace
}  // namespace tandem::gpu
