// Which kernels have an output gate on a GPU, and which calls have none.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "api/make_problem.hpp"
#include "gpu/device.hpp"
#include "harness/error_of.hpp"
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
  bool gate = true;

  [[nodiscard]] ForwardArgs args() const {
    const Device cuda{.kind = Device::Kind::cuda, .index = gpu::first_described};
    ForwardArgs a;
    a.q = ConstTensor(nullptr, DType::bf16, {2, queries, 8, head_dim}, cuda);
    a.k = a.v = ConstTensor(nullptr, DType::bf16, {2, keys, 8, head_dim}, cuda);
    a.out = Tensor(nullptr, DType::bf16, {2, queries, 8, head_dim}, cuda);
    if (gate) a.gate = a.q;
    a.options = options;
    return a;
  }
  [[nodiscard]] Plan plan() const { return plan_gpu(make_problem(args(), Memory::described)); }
  [[nodiscard]] ForwardConfig config() const { return std::get<ForwardConfig>(plan().gpu->config); }
  [[nodiscard]] std::string error() const {
    return error_of(Status::unsupported, [&] { return explain(args()); });
  }
};

TEST(GatePlan, IsTheKernelOfTheCallWithoutIt) {
  for (const std::int64_t head_dim : {64, 128, 192, 256}) {
    const Call with{.head_dim = head_dim};
    ForwardConfig without = Call{.head_dim = head_dim, .gate = false}.config();
    EXPECT_TRUE(with.config().tiling.gate);
    EXPECT_FALSE(without.tiling.gate);
    without.tiling.gate = true;
    EXPECT_EQ(with.config(), without);
    EXPECT_NE(explain(with.args()).find("gate"), std::string::npos);
  }
}

/// A step of generation goes through the forward kernel, too, and what merges its parts has the gate.
TEST(GatePlan, OfFewQueriesIsWhatMergesParts) {
  const Plan plan = Call{.queries = 1, .keys = 50000}.plan();
  const auto& config = std::get<ForwardConfig>(plan.gpu->config);
  EXPECT_TRUE(config.tiling.gate && config.schedule.split);
  const gpu::Step& last = plan.gpu->list.all().back();
  ASSERT_EQ(last.kernel, &gpu::kernels::combine);
  EXPECT_TRUE(std::get<CombineConfig>(last.config).tiling.gate);
}

BackwardArgs backward_args(bool dgate) {
  const ForwardArgs forward = Call{}.args();
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
  EXPECT_EQ(Call{.options = eight_bits}.error(),
            "gate with an 8-bit precision has no GPU kernel; multiply out by its sigmoid, or copy the "
            "tensors to the CPU");
  EXPECT_EQ(Call{.head_dim = 320}.error(),
            "gate with head dimensions above 256 has no GPU kernel; multiply out by its sigmoid, or copy the "
            "tensors to the CPU");
}

}  // namespace
}  // namespace tandem
