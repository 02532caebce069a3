// Kernels with timestamps: what ptxas makes of them.
#include "ops/forward/trace.hpp"
#include "ops/forward/launch.hpp"

#include <gtest/gtest.h>

#include "gpu/kernels.hpp"

namespace tandem::gpu {
namespace {

class TracedForward : public testing::TestWithParam<ForwardConfig> {};

TEST_P(TracedForward, HasNoLocalMemoryAndProductsThatOverlap) {
  if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  const KernelUsage usage = find_kernel(traced_kernel_name(GetParam())).kernel->usage;
  EXPECT_GT(usage.registers, 0);
  EXPECT_EQ(usage.stack_bytes, 0);
  EXPECT_EQ(usage.spill_store_bytes, 0);
  EXPECT_EQ(usage.spill_load_bytes, 0);
  EXPECT_EQ(usage.serialised, 0) << "ptxas serialises the products";
}

constexpr Tiling narrow{.head_dim_qk = 64, .head_dim_v = 64, .block_m = 192, .block_n = 128};
constexpr Tiling widest{.head_dim_qk = 256, .head_dim_v = 256, .block_n = 64};
INSTANTIATE_TEST_SUITE_P(Trace, TracedForward,
                         testing::Values(ForwardConfig{}, ForwardConfig{.schedule = {.overlap = false}},
                                         ForwardConfig{.tiling = narrow, .stages = 4},
                                         ForwardConfig{.tiling = widest}));

TEST(TracedName, IsOfAnotherFile) {
  EXPECT_NE(traced_kernel_name({}), kernels::forward.name(ForwardConfig{}));
  EXPECT_EQ(traced_kernel_name({}).expression, kernels::forward.name(ForwardConfig{}).expression);
}

}  // namespace
}  // namespace tandem::gpu
