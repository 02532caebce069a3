// The portable kernels by NVRTC: the set becomes PTX that any driver from Ampere's on can compile, and a
// compiler that is older than the GPU makes more.
#include <gtest/gtest.h>

#include <string>

#include "gpu/kernels.hpp"
#include "gpu/shipped.hpp"
#include "kernel_sample.hpp"
#include "ops/cache/launch.hpp"
#include "ops/portable_set.hpp"

namespace tandem::gpu {
namespace {

class Portable : public testing::TestWithParam<std::size_t> {};

void expect_ptx_of_ampere(const KernelName& name) {
  const CompiledKernel& kernel = *find_kernel(name).kernel;
  ASSERT_TRUE(kernel.is_ptx());
  const std::string text = kernel.image.data();
  EXPECT_NE(text.find(".target sm_80\n"), std::string::npos);
  EXPECT_NE(text.find(".entry " + kernel.symbol), std::string::npos);
  EXPECT_EQ(text.find("griddepcontrol"), std::string::npos) << "an instruction of Hopper's";
  EXPECT_LT(text.size(), 400U << 10);
}

/// What a driver may make of it: one kernel serves every mask, and is to fit the registers all the same.
void expect_no_local_memory(KernelName name) {
  name.architecture = "sm_80";
  EXPECT_EQ(find_kernel(name).kernel->usage.stack_bytes, 0);
}

TEST_P(Portable, IsPtxOfAmpereThatFitsItsRegisters) {
  if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  const std::vector<KernelName> kernels = portable_kernels();
  const auto [begin, end] = sample_of(GetParam(), kernels.size());
  for (std::size_t i = begin; i < end; ++i) {
    SCOPED_TRACE(kernels[i].expression);
    expect_ptx_of_ampere(kernels[i]);
    expect_no_local_memory(kernels[i]);
  }
}
INSTANTIATE_TEST_SUITE_P(Set, Portable, testing::Range<std::size_t>(0, groups_of(portable_kernels().size())));

/// A GPU newer than the compiler: what the set lacks is compiled to PTX.
TEST(OlderCompiler, ServesAnArchitectureThatNvrtcDoesNotKnow) {
  if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  EXPECT_EQ(why_portable("sm_86"), "");
  EXPECT_NE(why_portable("sm_999").find("does not know sm_999"), std::string::npos);
  KernelName name = kernels::merge.name(MergeConfig{.from = Stored::f16, .to = Stored::f16});
  name.architecture = "sm_999";
  EXPECT_FALSE(find_shipped(name));
  EXPECT_TRUE(find_kernel(name).kernel->is_ptx());
}

}  // namespace
}  // namespace tandem::gpu
