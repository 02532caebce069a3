// The archive of kernels that is linked into the library, and what ptxas makes of the set that goes
// into it.
#include "gpu/shipped.hpp"
#include "ops/cache/launch.hpp"
#include "ops/eight_bit/launch.hpp"
#include "ops/forward/launch.hpp"
#include "ops/quantize/launch.hpp"

#include <gtest/gtest.h>

#include "gpu/kernel_spec.hpp"
#include "gpu/kernels.hpp"
#include "kernel_sample.hpp"
#include "ops/backward/launch.hpp"
#include "ops/backward/plan.hpp"
#include "ops/cache/plan.hpp"
#include "ops/decode/plan.hpp"
#include "ops/eight_bit/plan.hpp"
#include "ops/eight_bit_backward/launch.hpp"
#include "ops/eight_bit_backward/plan.hpp"
#include "ops/forward/plan.hpp"
#include "ops/latent/plan.hpp"
#include "ops/portable_set.hpp"
#include "ops/quantize/plan.hpp"

namespace tandem::gpu {
namespace {

TEST(Shipped, HoldsEveryConfigOfTheList) {
  if (shipped_archive().empty()) GTEST_SKIP() << "built without the shipped set (TANDEM_SHIP_KERNELS)";
  EXPECT_GT(shipped_kernels(), shipped_forward_configs().size() + shipped_decode_configs().size() +
                                   shipped_backward_configs().size() + 2);
  for (const BackwardConfig& config : shipped_backward_configs()) {
    const BackwardConfig rows = backward_rows_config(config);
    EXPECT_TRUE(find_shipped(kernels::backward_preprocess.name(rows)));
    EXPECT_TRUE(find_shipped(kernels::backward_convert.name(rows)));
    EXPECT_TRUE(find_shipped(kernels::backward.name(config))) << expression_of(config);
    if (!config.f32_dk_dv) continue;
    BackwardConfig all = config;
    all.f32_dq = true;
    EXPECT_TRUE(find_shipped(kernels::backward_convert.name(backward_convert_config(all))));
  }
  for (const EightBitConfig& config : shipped_eight_bit_configs()) {
    EXPECT_TRUE(find_shipped(kernels::eight_bit_forward.name(config))) << expression_of(config);
  }
  for (const EightBitBackwardConfig& config : shipped_eight_bit_backward_configs()) {
    const QuantizeConfig quantizer = gradient_quantizer_of(config);
    EXPECT_TRUE(find_shipped(kernels::eight_bit_backward.name(config))) << expression_of(config);
    EXPECT_TRUE(find_shipped(kernels::mean_of_gradients.name(mean_config(quantizer))));
    EXPECT_TRUE(find_shipped(kernels::quantize_keys.name(quantizer)));
    EXPECT_TRUE(find_shipped(kernels::quantize_queries.name(quantizer)));
    EXPECT_TRUE(find_shipped(kernels::eight_bit_convert.name(eight_bit_convert_config(config))));
  }
  for (const QuantizeConfig& config : shipped_quantize_configs()) {
    EXPECT_TRUE(find_shipped(kernels::quantize.name(config))) << expression_of(config);
    EXPECT_TRUE(find_shipped(kernels::mean_of_keys.name(mean_config(config))));
  }
  for (const AppendConfig& config : shipped_append_configs()) {
    EXPECT_TRUE(find_shipped(kernels::append.name(config))) << expression_of(config);
  }
  for (const MergeConfig& config : shipped_merge_configs()) {
    EXPECT_TRUE(find_shipped(kernels::merge.name(config))) << expression_of(config);
  }
  const auto has_all = [](const auto& configs) {
    for (const auto& config : configs) {
      const auto kernel = find_shipped(kernel_of(config).name(config));
      ASSERT_TRUE(kernel) << expression_of(config);
      EXPECT_EQ(std::string(kernel->image.data() + 1, 3), "ELF");
      if (config.schedule.split) {
        EXPECT_TRUE(find_shipped(kernels::combine.name(combine_config(config))));
      }
    }
  };
  has_all(shipped_forward_configs());
  has_all(shipped_decode_configs());
  has_all(shipped_latent_configs());
}

TEST(Shipped, HoldsThePortablePart) {
  if (shipped_archive().empty()) GTEST_SKIP() << "built without the shipped set (TANDEM_SHIP_KERNELS)";
  for (const KernelName& name : portable_kernels()) {
    const auto kernel = find_shipped(name);
    ASSERT_TRUE(kernel) << name.expression;
    EXPECT_TRUE(kernel->is_ptx()) << name.expression;
  }
}

TEST(Shipped, LacksWhatIsNotOnTheList) {
  ForwardConfig config;
  config.tiling.block_n = 16;
  EXPECT_FALSE(find_shipped(kernel_of(config).name(config)));
}

void expect_fast(const KernelName& name, int local_bytes = 0) {
  const KernelUsage usage = find_kernel(name).kernel->usage;
  EXPECT_GT(usage.registers, 0);
  EXPECT_LE(usage.stack_bytes, local_bytes);
  EXPECT_LE(usage.spill_store_bytes, local_bytes);
  EXPECT_LE(usage.spill_load_bytes, local_bytes);
  EXPECT_EQ(usage.serialised, 0) << "ptxas serialises the products";
}

/// A group of the set's kernels of one family. A kernel that the disk cache has is not compiled again.
class ShippedSet : public testing::TestWithParam<std::size_t> {
 public:
  static auto groups_of(std::size_t kernels) {
    return testing::Range<std::size_t>(0, gpu::groups_of(kernels));
  }

 protected:
  /// f of the Configs of the group that are compiled.
  template <typename Config, typename F>
  static void each(const std::vector<Config>& configs, const F& f) {
    if (const std::string why = why_no_compiler(); !why.empty()) GTEST_SKIP() << why;
    const auto [begin, end] = sample_of(GetParam(), configs.size());
    for (std::size_t i = begin; i < end; ++i) {
      SCOPED_TRACE(expression_of(configs[i]));
      f(configs[i]);
    }
  }
};

class ShippedForward : public ShippedSet {};
TEST_P(ShippedForward, HasTheLocalMemoryOfThePlanAndProductsThatOverlap) {
  each(shipped_forward_configs(), [](const ForwardConfig& config) {
    ASSERT_EQ(forward_objection(config), "");
    expect_fast(kernel_of(config).name(config), forward_local_bytes_allowed(config));
    if (config.schedule.split) expect_fast(kernels::combine.name(combine_config(config)));
  });
}
INSTANTIATE_TEST_SUITE_P(Shipped, ShippedForward, ShippedSet::groups_of(shipped_forward_configs().size()));

/// Those of the kernels beside `forward`.
class ShippedForwards : public ShippedSet {
 protected:
  template <typename Config>
  static void expect_all_fast(const std::vector<Config>& configs) {
    each(configs, [](const Config& config) {
      ASSERT_EQ(forward_objection(config), "");
      expect_fast(kernel_of(config).name(config));
      if (config.schedule.split) expect_fast(kernels::combine.name(combine_config(config)));
    });
  }
};
class ShippedDecode : public ShippedForwards {};
TEST_P(ShippedDecode, HasNoLocalMemory) {
  expect_all_fast(shipped_decode_configs());
}
INSTANTIATE_TEST_SUITE_P(Shipped, ShippedDecode, ShippedSet::groups_of(shipped_decode_configs().size()));
class ShippedLatent : public ShippedForwards {};
TEST_P(ShippedLatent, HasNoLocalMemory) {
  expect_all_fast(shipped_latent_configs());
}
INSTANTIATE_TEST_SUITE_P(Shipped, ShippedLatent, ShippedSet::groups_of(shipped_latent_configs().size()));

class ShippedEightBit : public ShippedSet {};
TEST_P(ShippedEightBit, HasTheLocalMemoryOfThePlanAndProductsThatOverlap) {
  each(shipped_eight_bit_configs(), [](const EightBitConfig& config) {
    ASSERT_EQ(eight_bit_objection(config), "");
    expect_fast(kernels::eight_bit_forward.name(config), eight_bit_local_bytes_allowed(config));
    const EightBitConfig in_place = eight_bit_in_place(config);  // not in the set
    if (!eight_bit_objection(in_place).empty()) return;
    expect_fast(kernels::eight_bit_forward.name(in_place), eight_bit_local_bytes_allowed(in_place));
  });
}
INSTANTIATE_TEST_SUITE_P(Shipped, ShippedEightBit, ShippedSet::groups_of(shipped_eight_bit_configs().size()));

class ShippedBackward : public ShippedSet {};
TEST_P(ShippedBackward, HasTheLocalMemoryOfThePlanAndProductsThatOverlap) {
  each(shipped_backward_configs(), [](const BackwardConfig& config) {
    ASSERT_EQ(backward_objection(config), "");
    expect_fast(kernels::backward.name(config), backward_local_bytes_allowed(config));
    expect_fast(kernels::backward_preprocess.name(backward_rows_config(config)));
    expect_fast(kernels::backward_convert.name(backward_rows_config(config)));
    BackwardConfig all = config;
    all.f32_dq = true;
    if (config.f32_dk_dv) expect_fast(kernels::backward_convert.name(backward_convert_config(all)));
  });
}
INSTANTIATE_TEST_SUITE_P(Shipped, ShippedBackward, ShippedSet::groups_of(shipped_backward_configs().size()));

class ShippedEightBitBackward : public ShippedSet {};
TEST_P(ShippedEightBitBackward, HasTheLocalMemoryOfThePlanAndProductsThatOverlap) {
  each(shipped_eight_bit_backward_configs(), [](const EightBitBackwardConfig& shipped) {
    EightBitBackwardConfig narrow = shipped;  // not in the set
    narrow.tiling.head_dim_qk = narrow.tiling.head_dim_v = 64;
    narrow.tiling.block_m = gradient_queries(64);
    for (const EightBitBackwardConfig& config : {shipped, narrow}) {
      ASSERT_EQ(eight_bit_backward_objection(config), "");
      expect_fast(kernels::eight_bit_backward.name(config), eight_bit_backward_local_bytes_allowed(config));
      const QuantizeConfig quantizer = gradient_quantizer_of(config);
      expect_fast(kernels::quantize_keys.name(quantizer));
      expect_fast(kernels::quantize_queries.name(quantizer));
      expect_fast(kernels::eight_bit_convert.name(eight_bit_convert_config(config)));
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Shipped, ShippedEightBitBackward,
                         ShippedSet::groups_of(shipped_eight_bit_backward_configs().size()));

class ShippedQuantiser : public ShippedSet {};
TEST_P(ShippedQuantiser, HasNoLocalMemory) {
  each(shipped_quantize_configs(), [](const QuantizeConfig& config) {
    expect_fast(kernels::quantize.name(config));
    expect_fast(kernels::mean_of_keys.name(mean_config(config)));
  });
}
INSTANTIATE_TEST_SUITE_P(Shipped, ShippedQuantiser, ShippedSet::groups_of(shipped_quantize_configs().size()));

class ShippedAppend : public ShippedSet {};
TEST_P(ShippedAppend, HasNoLocalMemory) {
  each(shipped_append_configs(),
       [](const AppendConfig& config) { expect_fast(kernels::append.name(config)); });
}
INSTANTIATE_TEST_SUITE_P(Shipped, ShippedAppend, ShippedSet::groups_of(shipped_append_configs().size()));

class ShippedMerge : public ShippedSet {};
TEST_P(ShippedMerge, HasNoLocalMemory) {
  each(shipped_merge_configs(), [](const MergeConfig& config) { expect_fast(kernels::merge.name(config)); });
}
INSTANTIATE_TEST_SUITE_P(Shipped, ShippedMerge, ShippedSet::groups_of(shipped_merge_configs().size()));

}  // namespace
}  // namespace tandem::gpu
