// The portable kernels by NVRTC: the set becomes PTX that any driver from Ampere's on can compile, and a
// compiler that is older than the GPU makes more.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

#include "gpu/kernels.hpp"
#include "gpu/shipped.hpp"
#include "plan/portable_set.hpp"

namespace tandem::gpu {
namespace {

/// A group of the set: a process of its own in ctest. One of each group is compiled, or with
/// TANDEM_ALL_KERNELS=1 all, as of the rest of the shipped set.
class Portable : public testing::TestWithParam<std::size_t> {
 public:
  static constexpr std::size_t group = 4;
  static std::size_t groups() { return (portable_kernels().size() + group - 1) / group; }
};

TEST_P(Portable, BecomesPtxOfAmpere) {
  if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  const std::vector<KernelName> kernels = portable_kernels();
  const char* const wish = std::getenv("TANDEM_ALL_KERNELS");
  const bool all = wish != nullptr && std::string_view(wish) == "1";
  const std::size_t begin = GetParam() * group;
  for (std::size_t i = begin; i < std::min(kernels.size(), begin + (all ? group : 1)); ++i) {
    SCOPED_TRACE(kernels[i].expression);
    const CompiledKernel& kernel = *find_kernel(kernels[i]).kernel;
    ASSERT_TRUE(kernel.is_ptx());
    const std::string text = kernel.image.data();
    EXPECT_NE(text.find(".target sm_80\n"), std::string::npos);
    EXPECT_NE(text.find(".entry " + kernel.symbol), std::string::npos);
    EXPECT_EQ(text.find("griddepcontrol"), std::string::npos) << "an instruction of Hopper's";
    EXPECT_LT(text.size(), 400U << 10);
  }
}
INSTANTIATE_TEST_SUITE_P(Set, Portable, testing::Range<std::size_t>(0, Portable::groups()));

/// A GPU newer than the compiler: what the set lacks is compiled to PTX.
TEST(OlderCompiler, ServesAnArchitectureThatNvrtcDoesNotKnow) {
  if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  EXPECT_EQ(why_portable("sm_86"), "");
  EXPECT_NE(why_portable("sm_999").find("does not know sm_999"), std::string::npos);
  KernelName name = kernel_name(MergeConfig{.from = Stored::f16, .to = Stored::f16});
  name.architecture = "sm_999";
  EXPECT_FALSE(find_shipped(name));
  EXPECT_TRUE(find_kernel(name).kernel->is_ptx());
}

}  // namespace
}  // namespace tandem::gpu
