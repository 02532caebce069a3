// Which kernels write max_logits on a GPU, and which calls have none.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "api/make_problem.hpp"
#include "gpu/device.hpp"
#include "harness/error_of.hpp"
#include "ops/eight_bit/plan.hpp"
#include "ops/forward/launch.hpp"
#include "ops/forward/plan.hpp"
#include "ops/plan_gpu.hpp"
#include "tandem/attention.hpp"

namespace tandem {
namespace {

/// On a GPU that is described alone.
struct Call {
  std::int64_t queries = 3000;
  std::int64_t keys = 3000;
  std::int64_t head_dim = 128;
  AttentionOptions options = {};
  bool max_logits = true;

  [[nodiscard]] ForwardArgs args() const {
    const Device cuda{.kind = Device::Kind::cuda, .index = gpu::first_described};
    ForwardArgs a;
    a.q = ConstTensor(nullptr, DType::bf16, {2, queries, 8, head_dim}, cuda);
    a.k = a.v = ConstTensor(nullptr, DType::bf16, {2, keys, 8, head_dim}, cuda);
    a.out = Tensor(nullptr, DType::bf16, {2, queries, 8, head_dim}, cuda);
    a.lse = Tensor(nullptr, DType::f32, {2, 8, queries}, cuda);
    if (max_logits) a.max_logits = a.lse;
    a.options = options;
    return a;
  }
  [[nodiscard]] Plan plan() const { return plan_gpu(make_problem(args(), Memory::described)); }
  template <typename Config>
  [[nodiscard]] Config config() const {
    return std::get<Config>(plan().gpu->config);
  }
  [[nodiscard]] std::string error() const {
    return error_of(Status::unsupported, [&] { return explain(args()); });
  }
};

AttentionOptions in(Precision precision, bool backward = false) {
  AttentionOptions options;
  options.precision = precision;
  if (backward) options.backward_precision = precision;
  return options;
}

TEST(MaxLogitsPlan, IsTheForwardKernelsThatMovesItsMaxima) {
  const auto with = Call{}.config<ForwardConfig>();
  auto without = Call{.max_logits = false}.config<ForwardConfig>();
  EXPECT_TRUE(with.tiling.max_logits);
  EXPECT_FALSE(without.tiling.max_logits);
  without.tiling.max_logits = true;
  EXPECT_EQ(with, without);
  EXPECT_NE(explain(Call{}.args()).find(moves_maxima), std::string::npos);
}

TEST(MaxLogitsPlan, OfAStepOfGenerationAreTheForwardKernelsAndCombines) {
  const Call step{.queries = 1, .keys = 8000};
  const Plan plan = step.plan();
  const auto config = std::get<ForwardConfig>(plan.gpu->config);
  EXPECT_TRUE(config.tiling.max_logits && config.schedule.split);
  const gpu::Step& last = plan.gpu->list.all().back();
  EXPECT_EQ(last.kernel, &gpu::kernels::combine);
  EXPECT_TRUE(std::get<CombineConfig>(last.config).tiling.max_logits);
}

/// What gradients in 8 bits have: forward, and backward by its max_logits.
TEST(MaxLogitsPlan, OfGradientsInEightBitsAreShipped) {
  const Call call{.options = in(Precision::int8, true)};
  const auto config = call.config<EightBitConfig>();
  EXPECT_TRUE(config.tiling.max_logits);
  const std::vector<EightBitConfig> shipped = shipped_eight_bit_configs();
  EXPECT_EQ(std::ranges::count(shipped, config), 1);
  auto without = Call{.options = in(Precision::int8), .max_logits = false}.config<EightBitConfig>();
  without.tiling.max_logits = true;
  EXPECT_EQ(config, without);
}

TEST(MaxLogitsPlan, SaysWhatHasNoKernel) {
  EXPECT_EQ(Call{.options = in(Precision::fp8)}.error(),
            "max_logits with precision fp8 has no GPU kernel; leave it out, or copy the tensors to the CPU");
  EXPECT_EQ((Call{.head_dim = 512}.error()),
            "max_logits with head dimensions above 256 has no GPU kernel; leave it out, or copy the tensors "
            "to the CPU");
  AttentionOptions dropout;
  dropout.dropout_p = 0.1F;
  EXPECT_EQ(Call{.options = dropout}.error(),
            "max_logits with a score or mask function, or dropout, has no GPU kernel; leave it out, or copy "
            "the tensors to the CPU");
}

}  // namespace
}  // namespace tandem
