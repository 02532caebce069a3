// The forward pass on a GPU against the fp64 oracle, and the contract's lines. Skipped, with the reason,
// where there is none.
#include <gtest/gtest.h>

#include <thread>

#include "gpu/device.hpp"
#include "gpu_cases.hpp"
#include "gpu_runner.hpp"
#include "harness/changes.hpp"
#include "harness/expect.hpp"
#include "harness/long_sums.hpp"

namespace tandem::gpu {
namespace {

using harness::Call;
using harness::Case;

class Gpu : public GpuTest {};

void check_forward(Call& call) {
  SCOPED_TRACE(call.spec.describe());
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
void check_forward(const Case& spec) {
  Call call(spec);
  check_forward(call);
}

class GpuShapes : public Gpu, public testing::WithParamInterface<Shape> {};

TEST_P(GpuShapes, MatchTheOracle) {
  for (const std::int64_t seqlen : {1, 127, 300, 513}) {
    Case c = case_of(GetParam(), seqlen);
    check_forward(c);
  }
}

INSTANTIATE_TEST_SUITE_P(Forward, GpuShapes, testing::ValuesIn(shapes()),
                         [](const auto& at) { return name_of(at); });

/// Lines of the plan's table that no other shape has.
INSTANTIATE_TEST_SUITE_P(OtherTiles, GpuShapes,
                         testing::ValuesIn(shapes_of({{160, 160}, {256, 128}}, {DType::bf16})),
                         [](const auto& at) { return name_of(at); });

class GpuRandom : public Gpu, public testing::WithParamInterface<int> {};

TEST_P(GpuRandom, MatchesTheOracle) {
  check_forward(random_16_bit_case(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Forward, GpuRandom, testing::Range(1, 201));

/// Tensor cores add to one accumulator over all keys, and the softmax's sum is one over a thread's columns.
TEST_F(Gpu, SumsOverManyKeysKeepTheirDigits) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::int64_t keys : {2048, 10000, 100000, 1000000}) {
      for (const std::int64_t rows : {1, 16}) {
        Call call = harness::many_keys(dtype, rows, keys, true);
        check_forward(call);
      }
    }
  }
}

TEST_F(Gpu, ManyHeadsAndBatches) {
  Case c = with(small_case(DType::f16, 1, 2), {.batch = 70000, .head_dim = 8});
  check_forward(c);
  change(c, {.batch = 1, .heads = 70000});
  check_forward(c);
}

TEST_F(Gpu, ResultsAreBitwiseReproducible) {
  for (const bool causal : {false, true}) {
    Case c = with(small_case(DType::bf16, 1500, 1500), {.batch = 2, .heads_q = 8, .heads_kv = 2});
    change(c, {.head_dim = 128, .causal = causal});
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
      check_forward(with(harness::random_case(seed + i, 200), {.dtype = DType::bf16, .scales = 0}));
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
