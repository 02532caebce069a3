// Which kernels write max_logits on a GPU, and which calls have none.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "ops/eight_bit/plan.hpp"
#include "ops/forward/launch.hpp"
#include "ops/forward/plan.hpp"
#include "plan/described_call.hpp"

namespace tandem {
namespace {

AttentionOptions in(Precision precision, bool backward = false) {
  AttentionOptions options;
  options.precision = precision;
  if (backward) options.backward_precision = precision;
  return options;
}

TEST(MaxLogitsPlan, IsTheForwardKernelsThatMovesItsMaxima) {
  const auto with = DescribedCall{.max_logits = true}.config<ForwardConfig>();
  auto without = DescribedCall{}.config<ForwardConfig>();
  EXPECT_TRUE(with.tiling.max_logits);
  EXPECT_FALSE(without.tiling.max_logits);
  without.tiling.max_logits = true;
  EXPECT_EQ(with, without);
  EXPECT_NE(explain(DescribedCall{.max_logits = true}.args()).find(moves_maxima), std::string::npos);
}

TEST(MaxLogitsPlan, OfAStepOfGenerationAreTheForwardKernelsAndCombines) {
  const DescribedCall step{.queries = 1, .keys = 8000, .max_logits = true};
  const Plan plan = step.plan();
  const auto config = std::get<ForwardConfig>(plan.gpu->config);
  EXPECT_TRUE(config.tiling.max_logits && config.schedule.split);
  const gpu::Step& last = plan.gpu->list.all().back();
  EXPECT_EQ(last.kernel, &gpu::kernels::combine);
  EXPECT_TRUE(std::get<CombineConfig>(last.config).tiling.max_logits);
}

/// What gradients in 8 bits have: forward, and backward by its max_logits.
TEST(MaxLogitsPlan, OfGradientsInEightBitsAreShipped) {
  const DescribedCall call{.options = in(Precision::int8, true), .max_logits = true};
  const auto config = call.config<EightBitConfig>();
  EXPECT_TRUE(config.tiling.max_logits);
  const std::vector<EightBitConfig> shipped = shipped_eight_bit_configs();
  EXPECT_EQ(std::ranges::count(shipped, config), 1);
  auto without = DescribedCall{.options = in(Precision::int8)}.config<EightBitConfig>();
  without.tiling.max_logits = true;
  EXPECT_EQ(config, without);
}

TEST(MaxLogitsPlan, SaysWhatHasNoKernel) {
  EXPECT_EQ((DescribedCall{.options = in(Precision::fp8), .max_logits = true}.error()),
            "max_logits with precision fp8 has no GPU kernel; leave it out, or copy the tensors to the CPU");
  EXPECT_EQ((DescribedCall{.head_dim = 512, .max_logits = true}.error()),
            "max_logits with head dimensions above 256 has no GPU kernel; leave it out, or copy the tensors "
            "to the CPU");
  AttentionOptions dropout;
  dropout.dropout_p = 0.1F;
  EXPECT_EQ((DescribedCall{.options = dropout, .max_logits = true}.error()),
            "max_logits with a score or mask function, or dropout, has no GPU kernel; leave it out, or copy "
            "the tensors to the CPU");
}

}  // namespace
}  // namespace tandem
