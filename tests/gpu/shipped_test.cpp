// The archive of kernels that is linked into the library.
#include "gpu/shipped.hpp"

#include <gtest/gtest.h>

#include "gpu/kernel_name.hpp"
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
    EXPECT_LE(kernel->usage.stack_bytes, forward_local_bytes_allowed(config));
  }
}

TEST(Shipped, LacksWhatIsNotOnTheList) {
  ForwardConfig config;
  config.block_n = 16;
  EXPECT_FALSE(find_shipped(kernel_name(config)));
}

}  // namespace
}  // namespace tandem::gpu
