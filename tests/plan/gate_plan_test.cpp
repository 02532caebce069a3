// Which kernels have an output gate on a GPU, and which calls have none.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "api/make_problem.hpp"
#include "ops/forward/launch.hpp"
#include "ops/forward/plan.hpp"
#include "ops/plan_gpu.hpp"
#include "plan/described_call.hpp"

namespace tandem {
namespace {

TEST(GatePlan, IsTheKernelOfTheCallWithoutIt) {
  for (const std::int64_t head_dim : {64, 128, 192, 256}) {
    const DescribedCall with{.head_dim = head_dim, .gate = true};
    ForwardConfig without = DescribedCall{.head_dim = head_dim}.config<ForwardConfig>();
    EXPECT_TRUE(with.config<ForwardConfig>().tiling.gate);
    EXPECT_FALSE(without.tiling.gate);
    without.tiling.gate = true;
    EXPECT_EQ(with.config<ForwardConfig>(), without);
    EXPECT_NE(explain(with.args()).find("gate"), std::string::npos);
  }
}

/// A step of generation goes through the forward kernel, too, and what merges its parts has the gate.
TEST(GatePlan, OfFewQueriesIsWhatMergesParts) {
  const Plan plan = DescribedCall{.queries = 1, .keys = 50000, .gate = true}.plan();
  const auto& config = std::get<ForwardConfig>(plan.gpu->config);
  EXPECT_TRUE(config.tiling.gate && config.schedule.split);
  const gpu::Step& last = plan.gpu->list.all().back();
  ASSERT_EQ(last.kernel, &gpu::kernels::combine);
  EXPECT_TRUE(std::get<CombineConfig>(last.config).tiling.gate);
}

BackwardArgs backward_args(bool dgate) {
  const ForwardArgs forward = DescribedCall{.gate = true}.args();
  BackwardArgs a;
  static_cast<AttentionInputs&>(a) = forward;
  a.out = a.dout = forward.out;
  a.lse = ConstTensor(nullptr, DType::f32, {2, 8, 3000}, forward.q.device);
  if (dgate) {
    a.dgate = forward.out;
  } else {
    a.dq = forward.out;
  }
  return a;
}

std::vector<std::string> kernels_of(const BackwardArgs& args) {
  std::vector<std::string> names;
  const Plan plan = plan_gpu(make_problem(args, Memory::described));
  for (const gpu::Step& step : plan.gpu->list.all()) {
    names.emplace_back(step.kernel->entry);
    // What it loads of dO before it waits for the kernel before, that one makes.
    EXPECT_FALSE(names.back() == "backward" && step.programmatic);
  }
  return names;
}

TEST(GatePlan, GradientsTakeTheOneBeforeTheGateFromThePreprocessKernel) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(kernels_of(backward_args(false)),
            (Names{"backward_gated_preprocess", "backward", "backward_convert"}));
  EXPECT_EQ(kernels_of(backward_args(true)), Names{"backward_gated_preprocess"});
  EXPECT_NE(explain(backward_args(false)).find("gate: backward_gated_preprocess makes dgate"),
            std::string::npos);
}

TEST(GatePlan, RefusesWhatNoKernelHas) {
  AttentionOptions eight_bits;
  eight_bits.precision = Precision::fp8;
  EXPECT_EQ((DescribedCall{.options = eight_bits, .gate = true}.error()),
            "gate with an 8-bit precision has no GPU kernel; multiply out by its sigmoid, or copy the "
            "tensors to the CPU");
  EXPECT_EQ((DescribedCall{.head_dim = 320, .gate = true}.error()),
            "gate with head dimensions above 256 has no GPU kernel; multiply out by its sigmoid, or copy the "
            "tensors to the CPU");
}

}  // namespace
}  // namespace tandem
