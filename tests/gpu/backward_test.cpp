// The backward pass on a GPU against the fp64 oracle. Skipped, with the reason, where there is none.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include "gpu_cases.hpp"
#include "gpu_runner.hpp"
#include "harness/changes.hpp"
#include "harness/expect.hpp"
#include "harness/long_sums.hpp"

namespace tandem::gpu {
namespace {

using harness::Call;
using harness::Case;

class GpuBackward : public GpuTest {};

/// Forward and backward on the GPU; the gradients against the oracle's. `known_limit`: a share of max(1, the
/// gradient) that records/numerics.md allows in place of a smaller bound of the contract's.
void check_backward(Call& call, double known_limit = 0.0) {
  SCOPED_TRACE(call.spec.describe());
  auto expected = harness::expect(call, Pass::backward);
  for (harness::Target* target : {&expected.dq, &expected.dk, &expected.dv}) {
    double largest = 0.0;
    for (const double value : target->values) largest = std::fmax(largest, std::abs(value));
    const harness::Bound known{.absolute = 0.0, .relative = known_limit};
    if (target->bound.at(largest) >= known.at(largest)) continue;
    target->bound = known;
    target->queries = 0.0;  // an error that all elements may have is one of RMS and gain
  }
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
void check_backward(Case spec) {
  spec.lse = true;
  Call call(spec);
  check_backward(call);
}

class GpuBackwardShapes : public GpuBackward, public testing::WithParamInterface<Shape> {};

TEST_P(GpuBackwardShapes, MatchTheOracle) {
  for (const std::int64_t seqlen : {1, 127, 300, 513}) {
    Case c = case_of(GetParam(), seqlen);
    for (const bool deterministic : {false, true}) {
      c.options.deterministic = deterministic;
      check_backward(c);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backward, GpuBackwardShapes, testing::ValuesIn(shapes()),
                         [](const auto& at) { return name_of(at); });

class GpuBackwardRandom : public GpuBackward, public testing::WithParamInterface<int> {};

TEST_P(GpuBackwardRandom, MatchesTheOracle) {
  check_backward(random_16_bit_case(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Backward, GpuBackwardRandom, testing::Range(1, 101));

// Ping-pong begins at 512 queries, at 1024 with a mask, and the staggered start of tiles of 128 at 2048.
TEST_F(GpuBackward, LongSequencesMatchTheOracle) {
  for (const std::int64_t head_dim : {64, 128}) {
    Case c = with(small_case(DType::bf16, 1030, 1100), {.heads_q = 2, .heads_kv = 1, .head_dim = head_dim});
    Case causal = with(c, {.causal = true});
    Case window = with(c, {.window_left = 200, .window_right = 0});
    Case varlen = with(causal, {.used_k = {901}});
    Case full = with(c, {.heads_q = 1, .seqlen = 2050});
    for (Case spec : {causal, window, varlen, full}) {
      for (const bool deterministic : {false, true}) {
        spec.options.deterministic = deterministic;
        check_backward(spec);
      }
    }
  }
}

TEST_F(GpuBackward, LongSumsKeepTheirDigits) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::int64_t length : {2048, 10000, 100000, 1000000}) {
      // Tensor cores cut what they add to a large accumulator, and dS of a million keys is subnormal in f16.
      const bool limited = dtype == DType::f16 && length >= 100000;
      Call keys = harness::many_keys(dtype, 16, length, true);
      check_backward(keys, limited ? 3e-2 : 0.0);
      Call queries = harness::many_queries(dtype, length);
      check_backward(queries, limited ? 6e-3 : 0.0);
    }
  }
}

TEST_F(GpuBackward, KeysGradientsAreBitwiseReproducibleAndQueriesWhereAsked) {
  for (const bool causal : {false, true}) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
      Case c = with(small_case(DType::bf16, 1500, 1500), {.batch = 2, .heads_q = 8, .heads_kv = 2});
      change(c, {.head_dim = head_dim, .causal = causal, .sink = true});
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

/// Blocks of a fixed order wait for each other: two such grids, half of each resident, would never end.
TEST_F(GpuBackward, FixedOrdersOnSeveralStreamsEnd) {
  for (const std::int64_t head_dim : {64, 256}) {
    Case c = with(small_case(DType::bf16, 2048, 2048), {.heads = 24, .head_dim = head_dim});
    c.options.deterministic = true;
    std::vector<std::unique_ptr<Call>> calls;
    for (int i = 0; i < 4; ++i) {
      calls.push_back(std::make_unique<Call>(c));
      GpuRunner runner;
      calls.back()->prepare(Pass::forward);
      runner.forward(*calls.back());
    }
    std::vector<std::thread> threads;
    for (const auto& call : calls) {
      threads.emplace_back([&call] {
        for (int i = 0; i < 5; ++i) {
          call->prepare(Pass::backward);
          GpuRunner().backward(*call);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& call : calls) EXPECT_EQ(call->dq.raw(), calls[0]->dq.raw());
  }
}

}  // namespace
}  // namespace tandem::gpu
