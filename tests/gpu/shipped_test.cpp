// The archive of kernels that is linked into the library, and what ptxas makes of the set that goes
// into it.
#include "gpu/shipped.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "gpu/backward_params.hpp"
#include "gpu/kernel_name.hpp"
#include "gpu/kernels.hpp"
#include "plan/backward_plan.hpp"
#include "plan/eight_bit_plan.hpp"
#include "plan/forward_plan.hpp"
#include "plan/quantize_plan.hpp"

namespace tandem::gpu {
namespace {

TEST(Shipped, HoldsEveryConfigOfTheList) {
  if (shipped_archive().empty()) GTEST_SKIP() << "built without the shipped set (TANDEM_SHIP_KERNELS)";
  EXPECT_GT(shipped_kernels(), shipped_forward_configs().size() + shipped_backward_configs().size() + 2);
  for (const BackwardConfig& config : shipped_backward_configs()) {
    const BackwardConfig rows = backward_rows_config(config);
    EXPECT_TRUE(find_shipped(kernel_name(Kernel::backward_preprocess, rows)));
    EXPECT_TRUE(find_shipped(kernel_name(Kernel::backward_convert, rows)));
    EXPECT_TRUE(find_shipped(kernel_name(Kernel::backward, config))) << expression_of(config);
  }
  for (const EightBitConfig& config : shipped_eight_bit_configs()) {
    EXPECT_TRUE(find_shipped(kernel_name(config))) << expression_of(config);
  }
  for (const QuantizeConfig& config : shipped_quantize_configs()) {
    EXPECT_TRUE(find_shipped(kernel_name(Kernel::quantize, config))) << expression_of(config);
    EXPECT_TRUE(find_shipped(kernel_name(Kernel::mean_of_keys, mean_config(config))));
  }
  for (const ForwardConfig& config : shipped_forward_configs()) {
    const auto kernel = find_shipped(kernel_name(config));
    ASSERT_TRUE(kernel) << expression_of(config);
    EXPECT_EQ(std::string(kernel->cubin.data() + 1, 3), "ELF");
  }
}

TEST(Shipped, LacksWhatIsNotOnTheList) {
  ForwardConfig config;
  config.tiling.block_n = 16;
  EXPECT_FALSE(find_shipped(kernel_name(config)));
}

void expect_fast(const KernelName& name, int local_bytes = 0) {
  const KernelUsage usage = find_kernel(name).kernel->usage;
  EXPECT_GT(usage.registers, 0);
  EXPECT_LE(usage.stack_bytes, local_bytes);
  EXPECT_LE(usage.spill_store_bytes, local_bytes);
  EXPECT_LE(usage.spill_load_bytes, local_bytes);
  EXPECT_EQ(usage.serialised, 0) << "ptxas serialises the products";
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
    expect_fast(kernel_name(configs[i]), forward_local_bytes_allowed(configs[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(Shipped, ShippedSet, testing::Range<std::size_t>(0, ShippedSet::groups()));

TEST(ShippedQuantiser, CompilesWithoutLocalMemory) {
  if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  for (const QuantizeConfig& config : shipped_quantize_configs()) {
    SCOPED_TRACE(expression_of(config));
    expect_fast(kernel_name(Kernel::quantize, config), quantize_local_bytes_allowed(config));
    expect_fast(kernel_name(Kernel::mean_of_keys, mean_config(config)));
  }
}

/// Of the 8-bit set, for each head dimension and recipe, kernels without mask and lengths or with both.
std::vector<EightBitConfig> eight_bit_samples() {
  std::vector<EightBitConfig> samples;
  int next = 0;
  for (const EightBitConfig& c : shipped_eight_bit_configs()) {
    if (c.mask.varlen != c.mask.causal) continue;
    if (next++ % 4 % 3 == 0) samples.push_back(c);
  }
  return samples;
}

class ShippedEightBitSet : public testing::TestWithParam<std::size_t> {
 public:
  static constexpr std::size_t group = 5;
};

TEST_P(ShippedEightBitSet, CompilesWithoutLocalMemoryAndWithProductsThatOverlap) {
  if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  const std::vector<EightBitConfig> configs = eight_bit_samples();
  const std::size_t end = std::min(configs.size(), (GetParam() + 1) * group);
  for (std::size_t i = GetParam() * group; i < end; ++i) {
    SCOPED_TRACE(expression_of(configs[i]));
    expect_fast(kernel_name(configs[i]), eight_bit_local_bytes_allowed(configs[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(Shipped, ShippedEightBitSet,
                         testing::Range<std::size_t>(0, (eight_bit_samples().size() +
                                                         ShippedEightBitSet::group - 1) /
                                                            ShippedEightBitSet::group));

/// Of the backward set those in bf16 without windows and in any order: the others differ from them little,
/// and each takes some seconds.
std::vector<BackwardConfig> backward_samples() {
  std::vector<BackwardConfig> samples;
  for (const BackwardConfig& c : shipped_backward_configs()) {
    if (c.tiling.element == Element::bf16 && !c.mask.local && !c.schedule.deterministic &&
        c.tiling.head_dim_qk == c.tiling.head_dim_v)
      samples.push_back(c);
  }
  return samples;
}

class ShippedBackwardSet : public testing::TestWithParam<std::size_t> {
 public:
  static constexpr std::size_t group = 4;
};

TEST_P(ShippedBackwardSet, CompilesWithoutLocalMemoryAndWithProductsThatOverlap) {
  if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
  const std::vector<BackwardConfig> configs = backward_samples();
  const std::size_t end = std::min(configs.size(), (GetParam() + 1) * group);
  for (std::size_t i = GetParam() * group; i < end; ++i) {
    SCOPED_TRACE(expression_of(configs[i]));
    ASSERT_EQ(backward_objection(configs[i]), "");
    expect_fast(kernel_name(Kernel::backward, configs[i]), backward_local_bytes_allowed(configs[i]));
    if (configs[i].mask.causal) continue;  // the kernels around the main one know no mask
    expect_fast(kernel_name(Kernel::backward_preprocess, backward_rows_config(configs[i])));
    expect_fast(kernel_name(Kernel::backward_convert, backward_rows_config(configs[i])));
  }
}

INSTANTIATE_TEST_SUITE_P(Shipped, ShippedBackwardSet,
                         testing::Range<std::size_t>(0, (backward_samples().size() +
                                                         ShippedBackwardSet::group - 1) /
                                                            ShippedBackwardSet::group));

}  // namespace
}  // namespace tandem::gpu
