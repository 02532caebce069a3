// Gradients in 8 bits on a GPU, from 16-bit tensors to dq, dk and dv: forward in int8 with max_logits, and
// backward, each against fp64 by its recipe.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "gpu_cases.hpp"
#include "gpu_runner.hpp"
#include "harness/changes.hpp"
#include "harness/gradient_recipe.hpp"
#include "harness/recipe_reference.hpp"

namespace tandem::gpu {
namespace {

using harness::Box;
using harness::Call;
using harness::Case;

void expect_nothing_changed_outside(Call& call, Pass pass) {
  for (const Box* box : call.outputs(pass)) EXPECT_TRUE(!box->given() || box->changed_outside().empty());
}

/// Forward by the recipe, max_logits with it; and so are the bits without max_logits.
void check_forward(Call& call) {
  GpuRunner runner;
  call.prepare(Pass::forward);
  runner.forward(call);
  EXPECT_TRUE(follows_recipe(call, expect_recipe(call, harness::Accumulator::tensor_cores)));
  expect_nothing_changed_outside(call, Pass::forward);
  Call without(call);
  without.max_logits = {};
  without.prepare(Pass::forward);
  runner.forward(without);
  EXPECT_EQ(without.out.raw(), call.out.raw());
  EXPECT_EQ(without.lse.raw(), call.lse.raw());
}

void check_gradients(Call& call) {
  SCOPED_TRACE(call.spec.describe());
  check_forward(call);
  GpuRunner runner;
  run_by_gradient_recipe(runner, call);
}
void check_gradients(const Case& spec) {
  Call call(spec);
  check_gradients(call);
}

/// What gradients in 8 bits have kernels for.
Case in_8_bits(Case c, std::int64_t head_dim = 128) {
  c.out_dtype = c.dtype;
  c.scales = 0;
  change(c, {.head_dim = head_dim, .softcap = 0.0F, .split_size = 0, .precision = Precision::int8});
  change(c, {.strict = false, .sink = false, .lse = true, .amplitude = 1.0});
  c.options.backward_precision = Precision::int8;
  return c;
}

class MaxLogits : public GpuTest, public testing::WithParamInterface<Shape> {};

TEST_P(MaxLogits, OfTheForwardPassInInt8FollowTheRecipe) {
  for (const bool strict : {false, true}) {
    for (const std::int64_t seqlen : {1, 300}) {
      Case c = case_of(GetParam(), seqlen);
      change(c, {.precision = Precision::int8, .strict = strict});
      for (const bool varlen : {false, true}) {
        if (varlen) change(c, {.used_q = {seqlen, seqlen / 3}, .used_k = {seqlen / 2, seqlen + 64}});
        SCOPED_TRACE(c.describe());
        Call call(c);
        call.ask_for_max_logits();
        check_forward(call);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, MaxLogits,
                         testing::ValuesIn(shapes_of({{64, 64}, {128, 128}, {256, 256}}, {DType::bf16})),
                         name_of);

class GradientsInEightBits : public GpuTest, public testing::WithParamInterface<Shape> {};

TEST_P(GradientsInEightBits, FollowTheRecipe) {
  const auto in_8_bits = [](const Case& c) { return gpu::in_8_bits(c, c.head_dim_qk); };
  for (const std::int64_t seqlen : {1, 127, 513}) {
    for (const bool deterministic : {false, true}) {
      Case c = in_8_bits(case_of(GetParam(), seqlen));
      check_gradients(with(c, {.deterministic = deterministic}));
    }
  }
  Case c = in_8_bits(case_of(GetParam(), 300));
  check_gradients(with(c, {.dlse = true}));
  for (const unsigned f32 : {1U, 2U, 3U}) {
    c.f32_gradients = f32;
    check_gradients(c);
  }
  c.f32_gradients = 0;
  check_gradients(with(c, {.used_q = {300, 131}, .used_k = {201, 364}}));
  change(c, {.batch = 4, .packed = true, .lengths_q = {300, 0, 1, 131}, .lengths_k = {201, 9, 364, 131}});
  check_gradients(c);
}

INSTANTIATE_TEST_SUITE_P(Shapes, GradientsInEightBits,
                         testing::ValuesIn(shapes_of({{64, 64}, {128, 128}}, {DType::bf16, DType::f16})),
                         name_of);

/// Of several tiles of keys for each multiprocessor's turn.
TEST_F(GpuTest, GradientsInEightBitsOfLongSequences) {
  for (const bool causal : {false, true}) {
    for (const std::int64_t head_dim : {64, 128}) {
      const Case c = in_8_bits(small_case(DType::bf16, 2048, 2048), head_dim);
      check_gradients(with(c, {.heads_q = 2, .heads_kv = 1, .causal = causal}));
    }
  }
}

TEST_F(GpuTest, GradientsInEightBitsOfQueriesWithoutKeysAre0) {
  Call call(with(in_8_bits(small_case(DType::bf16, 150, 70)), {.heads_q = 4, .heads_kv = 2, .causal = true}));
  const std::int64_t row = call.dout.numel() / 150;
  for (std::int64_t n = 0; n < row; ++n) call.dout.set(7 * row + n, std::numeric_limits<double>::quiet_NaN());
  check_gradients(call);
}

/// Whatever the order in which thread blocks come.
TEST_F(GpuTest, GradientsInEightBitsInAFixedOrderHaveTheSameBits) {
  Case c = in_8_bits(small_case(DType::bf16, 1500, 1500));
  Call call(with(c, {.batch = 2, .heads_q = 8, .heads_kv = 2, .causal = true, .deterministic = true}));
  GpuRunner runner;
  call.prepare(Pass::forward);
  runner.forward(call);
  std::vector<std::byte> first;
  for (int n = 0; n < 5; ++n) {
    call.prepare(Pass::backward);
    runner.backward(call);
    if (n == 0) first = call.dq.raw();
    EXPECT_EQ(call.dq.raw(), first) << n;
  }
}

class RandomGradientsInEightBits : public GpuTest, public testing::WithParamInterface<int> {};

TEST_P(RandomGradientsInEightBits, FollowTheRecipe) {
  Case c = in_8_bits(random_16_bit_case(GetParam()), GetParam() % 2 == 0 ? 64 : 128);
  // Rows that are all one row err alike, which the bound on the gain of out does not know.
  for (harness::Layout* layout : {&c.q, &c.k, &c.v, &c.dout}) layout->expanded = 0;
  if (c.options.scale.has_value()) c.options.scale = std::clamp(*c.options.scale, -0.3F, 0.3F);
  check_gradients(c);
}

INSTANTIATE_TEST_SUITE_P(Cases, RandomGradientsInEightBits, testing::Range(1, 31));

}  // namespace
}  // namespace tandem::gpu
