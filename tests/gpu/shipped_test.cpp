// The archive of kernels that is linked into the library, and what the assembler makes of the set that goes
// into it.
#include "gpu/shipped.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "gpu/kernel_name.hpp"
#include "gpu/kernels.hpp"
#include "plan/forward_plan.hpp"

namespace tandem::gpu {
namespace {

TEST(Shipped, HoldsEveryConfigOfTheList) {
  if (shipped_archive().empty()) GTEST_SKIP() << "built without the shipped set (TANDEM_SHIP_KERNELS)";
  EXPECT_EQ(shipped_kernels(), shipped_forward_configs().size() + 2);
  for (const ForwardConfig& config : shipped_forward_configs()) {
    const auto kernel = find_shipped(kernel_name(config));
    ASSERT_TRUE(kernel) << expression_of(config);
    EXPECT_EQ(std::string(kernel->cubin.data() + 1, 3), "ELF");
  }
}

TEST(Shipped, LacksWhatIsNotOnTheList) {
  ForwardConfig config;
  config.block_n = 16;
  EXPECT_FALSE(find_shipped(kernel_name(config)));
}

/// A group of the set: each is a process of its own in ctest, so that they compile side by side. A kernel
/// that the disk cache has is not compiled again.
class ShippedSet : public testing::TestWithParam<std::size_t> {
 public:
  static constexpr std::size_t group = 4;
  static std::size_t groups() { return (shipped_forward_configs().size() + group - 1) / group; }
};

TEST_P(ShippedSet, CompilesWithoutLocalMemoryAndWithProductsThatOverlap) {
  if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  const std::vector<ForwardConfig> configs = shipped_forward_configs();
  const std::size_t end = std::min(configs.size(), (GetParam() + 1) * group);
  for (std::size_t i = GetParam() * group; i < end; ++i) {
    SCOPED_TRACE(expression_of(configs[i]));
    ASSERT_EQ(forward_objection(configs[i]), "");
    const KernelUsage usage = find_kernel(kernel_name(configs[i])).kernel->usage;
    EXPECT_GT(usage.registers, 0);
    EXPECT_EQ(usage.stack_bytes, 0);
    EXPECT_EQ(usage.spill_store_bytes, 0);
    EXPECT_EQ(usage.spill_load_bytes, 0);
    EXPECT_EQ(usage.serialised, 0) << "the assembler serialises the products";
  }
}

INSTANTIATE_TEST_SUITE_P(Shipped, ShippedSet, testing::Range<std::size_t>(0, ShippedSet::groups()));

}  // namespace
}  // namespace tandem::gpu
