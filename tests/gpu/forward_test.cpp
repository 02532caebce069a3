// The forward pass on a GPU against the fp64 oracle, and the contract's lines. Skipped, with the reason,
// where there is none.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <thread>

#include "gpu/device.hpp"
#include "gpu_runner.hpp"
#include "harness/expect.hpp"

namespace tandem::gpu {
namespace {

using harness::Call;
using harness::Case;

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  }
};

void check_forward(const Case& spec) {
  SCOPED_TRACE(spec.describe());
  Call call(spec);
  const auto expected = harness::expect(call, Pass::forward);
  call.prepare(Pass::forward);
  GpuRunner runner;
  try {
    runner.forward(call);
  } catch (const Error& e) {
    FAIL() << e.what();
  }
  EXPECT_TRUE(harness::correct(call, Pass::forward, expected));
}

Case small_case(DType dtype, std::int64_t seqlen_q = 64, std::int64_t seqlen_k = 64) {
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

class GpuShapes : public Gpu, public testing::WithParamInterface<Shape> {};

TEST_P(GpuShapes, MatchTheOracle) {
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
    check_forward(c);
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
INSTANTIATE_TEST_SUITE_P(Forward, GpuShapes, testing::ValuesIn(shapes()), name_of_shape);

class GpuRandom : public Gpu, public testing::WithParamInterface<int> {};

TEST_P(GpuRandom, MatchesTheOracle) {
  Case c = harness::random_case(static_cast<std::uint64_t>(GetParam()), 400);
  if (c.dtype == DType::f32 || c.dtype == DType::e4m3) {
    c.dtype = c.out_dtype = GetParam() % 2 != 0 ? DType::f16 : DType::bf16;
    c.scales = 0;
  }
  check_forward(c);
}

INSTANTIATE_TEST_SUITE_P(Forward, GpuRandom, testing::Range(1, 201));

TEST_F(Gpu, NothingToDoIsDone) {
  for (const auto& [batch, q, k] :
       std::vector<std::array<std::int64_t, 3>>{{0, 5, 5}, {2, 0, 5}, {2, 5, 0}, {2, 0, 0}}) {
    Case c = small_case(DType::bf16, q, k);
    c.batch = batch;
    c.heads_q = 2;
    check_forward(c);
  }
}

TEST_F(Gpu, ManyHeadsAndBatches) {
  Case c = small_case(DType::f16, 1, 2);
  c.batch = 70000;
  c.head_dim_qk = c.head_dim_v = 8;
  check_forward(c);
  c.batch = 1;
  c.heads_q = c.heads_kv = 70000;
  check_forward(c);
}

TEST_F(Gpu, ResultsAreBitwiseReproducible) {
  for (const bool causal : {false, true}) {
    Case c = small_case(DType::bf16, 1500, 1500);
    c.batch = 2;
    c.heads_q = 8;
    c.heads_kv = 2;
    c.head_dim_qk = c.head_dim_v = 128;
    c.options.causal = causal;
    Call call(c);
    GpuRunner runner;
    call.prepare(Pass::forward);
    runner.forward(call);
    const auto out = call.out.raw();
    const auto lse = call.lse.raw();
    for (int i = 0; i < 200; ++i) {
      call.prepare(Pass::forward);
      runner.forward(call);
      ASSERT_EQ(call.out.raw(), out) << "run " << i;
      ASSERT_EQ(call.lse.raw(), lse) << "run " << i;
    }
  }
}

TEST_F(Gpu, TwoThreadsOnTwoStreamsAreIndependent) {
  const auto work = [](std::uint64_t seed) {
    for (std::uint64_t i = 0; i < 10; ++i) {
      Case c = harness::random_case(seed + i, 200);
      c.dtype = c.out_dtype = DType::bf16;
      c.scales = 0;
      check_forward(c);
    }
  };
  std::jthread other(work, 1000);
  work(2000);
}

TEST_F(Gpu, TheCurrentContextIsLeftAsItWas) {
  abi::Context before = nullptr;
  ASSERT_EQ(driver().context_get_current(&before), abi::success);
  check_forward(small_case(DType::f16));
  abi::Context after = nullptr;
  ASSERT_EQ(driver().context_get_current(&after), abi::success);
  EXPECT_EQ(before, after);
}

}  // namespace
}  // namespace tandem::gpu
