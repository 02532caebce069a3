// The backward pass on a GPU against the fp64 oracle. Skipped, with the reason, where there is none.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "gpu/device.hpp"
#include "gpu_runner.hpp"
#include "harness/expect.hpp"

namespace tandem::gpu {
namespace {

using harness::Call;
using harness::Case;

class GpuBackward : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  }
};

/// Forward and backward on the GPU; the gradients against the oracle's.
void check_backward(Case spec) {
  spec.lse = true;
  SCOPED_TRACE(spec.describe());
  Call call(spec);
  const auto expected = harness::expect(call, Pass::backward);
  GpuRunner runner;
  try {
    call.prepare(Pass::forward);
    runner.forward(call);
    call.prepare(Pass::backward);
    runner.backward(call);
  } catch (const Error& e) {
    FAIL() << e.what();
  }
  EXPECT_TRUE(harness::correct(call, Pass::backward, expected));
}

Case small_case(DType dtype, std::int64_t seqlen_q, std::int64_t seqlen_k) {
  Case c;
  c.dtype = c.out_dtype = dtype;
  c.seqlen_q = seqlen_q;
  c.seqlen_k = seqlen_k;
  return c;
}

struct Shape {
  std::int64_t head_dim_qk, head_dim_v;
  DType dtype;
  int mask;  ///< 0 none, 1 causal, 2 window
};

class GpuBackwardShapes : public GpuBackward, public testing::WithParamInterface<Shape> {};

TEST_P(GpuBackwardShapes, MatchTheOracle) {
  const Shape shape = GetParam();
  for (const std::int64_t seqlen : {1, 127, 300, 513}) {
    Case c = small_case(shape.dtype, seqlen, seqlen + 64);
    c.batch = 2;
    c.heads_q = 4;
    c.heads_kv = 2;
    c.head_dim_qk = shape.head_dim_qk;
    c.head_dim_v = shape.head_dim_v;
    c.options.causal = shape.mask == 1;
    if (shape.mask == 2) c.options.window_left = 100;
    if (shape.mask == 2) c.options.window_right = 30;
    for (const bool deterministic : {false, true}) {
      c.options.deterministic = deterministic;
      check_backward(c);
    }
  }
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const auto& [qk, v] : std::vector<std::pair<int, int>>{
           {64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}, {8, 8}, {40, 72}, {160, 32}}) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      for (const int mask : {0, 1, 2}) all.push_back({qk, v, dtype, mask});
    }
  }
  return all;
}

std::string name_of_shape(const testing::TestParamInfo<Shape>& at) {
  constexpr const char* masks[] = {"full", "causal", "window"};
  return fmt::format("d{}_{}_{}_{}", at.param.head_dim_qk, at.param.head_dim_v, name_of(at.param.dtype),
                     masks[at.param.mask]);
}
INSTANTIATE_TEST_SUITE_P(Backward, GpuBackwardShapes, testing::ValuesIn(shapes()), name_of_shape);

class GpuBackwardRandom : public GpuBackward, public testing::WithParamInterface<int> {};

TEST_P(GpuBackwardRandom, MatchesTheOracle) {
  Case c = harness::random_case(static_cast<std::uint64_t>(GetParam()), 400);
  if (c.dtype == DType::f32 || c.dtype == DType::e4m3) {
    c.dtype = c.out_dtype = GetParam() % 2 != 0 ? DType::f16 : DType::bf16;
    c.scales = 0;
  }
  check_backward(c);
}

INSTANTIATE_TEST_SUITE_P(Backward, GpuBackwardRandom, testing::Range(1, 101));

TEST_F(GpuBackward, NothingToDoIsDone) {
  for (const auto& [batch, q, k] :
       std::vector<std::array<std::int64_t, 3>>{{0, 5, 5}, {2, 0, 5}, {2, 5, 0}, {2, 0, 0}}) {
    Case c = small_case(DType::bf16, q, k);
    c.batch = batch;
    c.heads_q = 2;
    c.sink = true;
    check_backward(c);
  }
}

TEST_F(GpuBackward, KeysGradientsAreBitwiseReproducibleAndQueriesWhereAsked) {
  for (const bool causal : {false, true}) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
      Case c = small_case(DType::bf16, 1500, 1500);
      c.batch = 2;
      c.heads_q = 8;
      c.heads_kv = 2;
      c.head_dim_qk = c.head_dim_v = head_dim;
      c.options.causal = causal;
      c.sink = true;
      for (const bool deterministic : {false, true}) {
        c.options.deterministic = deterministic;
        Call call(c);
        GpuRunner runner;
        call.prepare(Pass::forward);
        runner.forward(call);
        call.prepare(Pass::backward);
        runner.backward(call);
        const auto dq = call.dq.raw();
        const auto dk = call.dk.raw();
        const auto dv = call.dv.raw();
        const auto dsink = call.dsink.raw();
        for (int i = 0; i < 30; ++i) {
          call.prepare(Pass::backward);
          runner.backward(call);
          ASSERT_EQ(call.dk.raw(), dk) << "run " << i;
          ASSERT_EQ(call.dv.raw(), dv) << "run " << i;
          ASSERT_EQ(call.dsink.raw(), dsink) << "run " << i;
          if (!deterministic) continue;
          ASSERT_EQ(call.dq.raw(), dq) << "run " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem::gpu
