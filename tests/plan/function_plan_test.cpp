// What functions on scores make of the plan of a call.
#include "ops/functions/plan.hpp"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "gpu/function_source.hpp"
#include "harness/error_of.hpp"
#include "ops/backward/plan.hpp"
#include "ops/forward/plan.hpp"
#include "plan/checks.hpp"
#include "tandem/error.hpp"

namespace tandem {
namespace {

Problem problem(const Function* score, const Function* mask, std::int64_t rows_q = 2048) {
  Problem p;
  p.batch = 2;
  p.heads_q = 8;
  p.heads_kv = 2;
  p.head_dim_qk = p.head_dim_v = 64;
  p.rows_q = rows_q;
  p.rows_k = 2048;
  p.scale = 0.125F;
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::bf16;
  p.score_function = score;
  p.mask_function = mask;
  return p;
}
ForwardConfig forward_of(const Problem& p) {
  return with_functions(choose_forward_config(CallFacts(p)), p);
}

const Function tanh_of_score = Function::parse("tanh(s)", Function::Kind::score);
const Function twice_the_score = Function::parse("mul(s, 2.0)", Function::Kind::score);
const Function causal = Function::parse("le(k, q)", Function::Kind::mask);

TEST(FunctionPlan, ConfigsNameTheFunctions) {
  const ForwardConfig none = forward_of(problem(nullptr, nullptr));
  EXPECT_FALSE(none.functions.given());
  EXPECT_EQ(none, choose_forward_config(CallFacts(problem(nullptr, nullptr))));
  const Functions first = forward_of(problem(&tanh_of_score, nullptr)).functions;
  const Functions second = forward_of(problem(&twice_the_score, nullptr)).functions;
  EXPECT_TRUE(first.given() && first.score_function && !first.mask_function);
  EXPECT_NE(first.digest, second.digest);
  const Functions both = forward_of(problem(&tanh_of_score, &causal)).functions;
  EXPECT_TRUE(both.score_function && both.mask_function);
  EXPECT_NE(both.digest, first.digest);
  EXPECT_EQ(choose_backward_config(CallFacts(problem(&tanh_of_score, &causal))).functions.digest,
            both.digest);
}

TEST(FunctionPlan, TheDigestIsOfTypesAndNotOfMemory) {
  const auto digest = [](DType type, std::int64_t size, const void* data) {
    const std::vector<ConstTensor> captured{ConstTensor(data, type, {size})};
    const Function f = Function::parse("add(s, real(t0[h]))", Function::Kind::score, captured);
    return gpu::functions_config({.score = &f}).digest;
  };
  int here = 0;
  EXPECT_EQ(digest(DType::f32, 4, &here), digest(DType::f32, 5, nullptr));
  EXPECT_NE(digest(DType::f32, 4, &here), digest(DType::bf16, 4, &here));
}

TEST(FunctionPlan, AScoreFunctionTakesScaledScores) {
  EXPECT_EQ(forward_of(problem(&tanh_of_score, nullptr)).transform, ScoreTransform::scaled);
  EXPECT_EQ(forward_of(problem(nullptr, &causal)).transform, ScoreTransform::raw);
  Problem capped = problem(&tanh_of_score, nullptr);
  capped.softcap = 5.0F;
  EXPECT_EQ(forward_of(capped).transform, ScoreTransform::softcap);
}

TEST(FunctionPlan, ListsAreOfMasksOnWholeTilesOfEqualLengths) {
  EXPECT_TRUE(forward_of(problem(nullptr, &causal)).functions.block_lists);
  EXPECT_FALSE(forward_of(problem(&tanh_of_score, nullptr)).functions.block_lists);
  EXPECT_FALSE(forward_of(problem(nullptr, &causal, 1)).functions.block_lists);
  Problem lengths = problem(nullptr, &causal);
  const int used[2] = {5, 7};
  lengths.seqused_k = {.data = used};
  EXPECT_FALSE(forward_of(lengths).functions.block_lists);
  Problem split = problem(nullptr, &causal);
  split.split_size = 128;
  EXPECT_FALSE(forward_of(split).functions.block_lists);
}

TEST(FunctionPlan, OneListServesWhatTheMaskDoesNotDependOn) {
  const Tiling tiling{.block_m = 128, .block_n = 128};
  const Function by_head = Function::parse("le(k, add(q, h))", Function::Kind::mask);
  const Function by_both = Function::parse("le(k, add(q, mul(h, b)))", Function::Kind::mask);
  EXPECT_EQ(gpu::listed_blocks(problem(nullptr, &causal), tiling).count, 16);
  EXPECT_EQ(gpu::listed_blocks(problem(nullptr, &by_head), tiling).count, 8 * 16);
  const gpu::ListedBlocks both = gpu::listed_blocks(problem(nullptr, &by_both), tiling);
  EXPECT_EQ(both.count, 2 * 8 * 16);
  EXPECT_EQ(both.lists.stride, 17);
  EXPECT_EQ(both.bytes(), 2 * 8 * 16 * 17 * 4);
}

TEST(FunctionPlan, BackwardListsAreOfMasksOnEqualLengthsInAnyOrder) {
  const auto lists = [](const Problem& p) {
    const BackwardConfig c = choose_backward_config(CallFacts(p));
    EXPECT_EQ(backward_objection(c), "");
    return c.functions.block_lists;
  };
  EXPECT_TRUE(lists(problem(nullptr, &causal)));
  EXPECT_TRUE(lists(problem(&tanh_of_score, &causal)));
  EXPECT_FALSE(lists(problem(&tanh_of_score, nullptr)));
  EXPECT_FALSE(lists(problem(nullptr, &causal, 256)));
  Problem lengths = problem(nullptr, &causal);
  const int used[2] = {5, 7};
  lengths.seqused_k = {.data = used};
  EXPECT_FALSE(lists(lengths));
  Problem ordered = problem(nullptr, &causal);
  ordered.deterministic = true;
  EXPECT_FALSE(lists(ordered));
  BackwardConfig wrong = choose_backward_config(CallFacts(problem(nullptr, &causal)));
  wrong.schedule.deterministic = true;
  EXPECT_NE(backward_objection(wrong), "");
  // Of 128 queries by 128 keys.
  const BackwardConfig config = choose_backward_config(CallFacts(problem(nullptr, &causal)));
  const gpu::ListedBlocks listed =
      gpu::listed_query_blocks(problem(nullptr, &causal), config.tile_keys(), config.tiling.block_m);
  EXPECT_EQ(listed.count, 16);
  EXPECT_EQ(listed.lists.stride, 17);
}

TEST(FunctionPlan, DropoutIsAskedOfEveryPair) {
  Problem p = problem(nullptr, nullptr);
  p.dropout = make_dropout(0.5F, 1, 2, 8);
  const Functions f = forward_of(p).functions;
  EXPECT_TRUE(f.given() && f.dropout && !f.score_function && !f.mask_function && !f.block_lists);
  EXPECT_NO_THROW(check_problem(p));
  const BackwardConfig c = choose_backward_config(CallFacts(p));
  EXPECT_TRUE(c.functions.dropout && c.sloped() && !c.schedule.pingpong);
  EXPECT_EQ(backward_objection(c), "");
  // The text is that of the functions alone.
  p.mask_function = &causal;
  EXPECT_EQ(forward_of(p).functions.digest, forward_of(problem(nullptr, &causal)).functions.digest);
}

/// alibi() differentiates its slopes: `wanted` are where a call has their gradient.
Function alibi(std::span<const int> differentiated) {
  static float slopes[8];
  const std::vector<ConstTensor> captured{ConstTensor(slopes, DType::f32, {8})};
  return Function::parse("add(s, mul(t0[h], real(sub(k, q))))", Function::Kind::score, captured,
                         differentiated);
}

TEST(FunctionPlan, GradientsOfCapturedTensorsAreAKernelOfTheirOwn) {
  constexpr int first[] = {0};
  const Function f = alibi(first);
  const Tensor wanted(nullptr, DType::f32, {8});
  Problem p = problem(&f, &causal);
  p.pass = Pass::backward;
  const BackwardConfig without = choose_backward_config(CallFacts(p));
  const std::string text = gpu::function_source(gpu::functions_of(p));
  p.captured_gradients = {&wanted, 1};
  const BackwardConfig with = choose_backward_config(CallFacts(p));
  EXPECT_EQ(backward_objection(with), "");
  EXPECT_TRUE(with.functions.captured_gradients && !without.functions.captured_gradients);
  EXPECT_NE(with.functions.digest, without.functions.digest);
  EXPECT_NE(gpu::function_source(gpu::functions_of(p)).find("gradient_count() { return 1; }"),
            std::string::npos);
  // A call that wants none has the kernel of a function that differentiates nothing.
  const Function plain = alibi({});
  EXPECT_EQ(without.functions.digest,
            choose_backward_config(CallFacts(problem(&plain, &causal))).functions.digest);
  EXPECT_EQ(text, gpu::function_source(gpu::functions_of(problem(&plain, &causal))));
  BackwardConfig wrong = with;
  wrong.tiling.block_n = 64;
  wrong.tiling.head_dim_qk = wrong.tiling.head_dim_v = 192;
  EXPECT_NE(backward_objection(wrong).find("captured_gradients"), std::string::npos);
}

TEST(FunctionPlan, GradientsOfCapturedTensorsHaveNoFixedOrder) {
  constexpr int first[] = {0};
  const Function f = alibi(first);
  const Tensor wanted(nullptr, DType::f32, {8});
  Problem p = problem(&f, nullptr);
  p.captured_gradients = {&wanted, 1};
  EXPECT_NO_THROW(check_problem(p));
  p.deterministic = true;
  EXPECT_NE(error_of(Status::unsupported, [&] { check_problem(p); }).find("added up in any order on a GPU"),
            std::string::npos);
}

TEST(FunctionPlan, OneQueryTakesTheForwardKernel) {
  EXPECT_TRUE(CallFacts(problem(nullptr, nullptr, 1)).decodes);
  EXPECT_FALSE(CallFacts(problem(nullptr, &causal, 1)).decodes);
}

/// Light functions leave the backward pass as many registers as none; others at 64 dimensions enough to take
/// turns, and wider none.
TEST(FunctionPlan, TilesOfGradientsAreByWhatAPairCosts) {
  const std::vector<ConstTensor> captured{ConstTensor(nullptr, DType::f32, {8}),
                                          ConstTensor(nullptr, DType::f32, {8, 4096})};
  const Function slopes =
      Function::parse("add(s, mul(t0[h], real(sub(k, q))))", Function::Kind::score, captured);
  const Function table =
      Function::parse("add(s, t1[h, add(sub(q, k), 2048)])", Function::Kind::score, captured);
  const Function by_query = Function::parse("add(s, t1[h, q])", Function::Kind::score, captured);
  const Function by_key = Function::parse("add(s, t1[h, k])", Function::Kind::score, captured);
  std::string text = "s";
  for (int i = 0; i < 7; ++i) text = "tanh(" + text + ")";
  const Function long_chain = Function::parse(text, Function::Kind::score);
  const auto tile = [](const Function* score, const Function* mask, int head_dim) {
    Problem p = problem(score, mask);
    p.head_dim_qk = p.head_dim_v = head_dim;
    const BackwardConfig c = choose_backward_config(CallFacts(p));
    EXPECT_EQ(backward_objection(c), "");
    return std::pair(c.tiling.block_m, c.schedule.pingpong);
  };
  for (const Function* light : {&tanh_of_score, &slopes, &by_key}) {
    EXPECT_TRUE(gpu::are_light(gpu::operations_of_pairs({.score = light, .mask = &causal})));
    EXPECT_EQ(tile(light, &causal, 64), std::pair(128, true));
    EXPECT_EQ(tile(light, &causal, 128), std::pair(64, true));
  }
  for (const Function* heavy : {&table, &by_query, &long_chain}) {
    EXPECT_FALSE(gpu::are_light(gpu::operations_of_pairs({.score = heavy})));
    EXPECT_EQ(tile(heavy, nullptr, 64), std::pair(64, true));
    EXPECT_EQ(tile(heavy, nullptr, 128), std::pair(64, false));
  }
  // Forward, ALiBi alone finds its rows' maxima in every block.
  EXPECT_EQ(gpu::operations_of_pairs({.score = &slopes}), 4);
  EXPECT_TRUE(forward_of(problem(&slopes, nullptr)).schedule.finds_maxima);
  EXPECT_FALSE(forward_of(problem(&tanh_of_score, nullptr)).schedule.finds_maxima);
  EXPECT_FALSE(forward_of(problem(&table, nullptr)).schedule.finds_maxima);
  EXPECT_FALSE(forward_of(problem(nullptr, &causal)).schedule.finds_maxima);
  Problem dropped = problem(nullptr, nullptr);
  dropped.dropout = make_dropout(0.5F, 1, 2, 8);
  EXPECT_FALSE(choose_backward_config(CallFacts(dropped)).schedule.pingpong);
  BackwardConfig wrong = choose_backward_config(CallFacts(problem(&slopes, nullptr)));
  wrong.functions.dropout = true;
  EXPECT_NE(backward_objection(wrong).find("pingpong has no step with dropout"), std::string::npos);
  EXPECT_TRUE(choose_backward_config(CallFacts(problem(&tanh_of_score, nullptr))).sloped());
  EXPECT_FALSE(choose_backward_config(CallFacts(problem(nullptr, &causal))).sloped());
}

TEST(FunctionPlan, WhatHasNoKernelIsAnError) {
  Problem wide = problem(nullptr, &causal);
  wide.head_dim_qk = wide.head_dim_v = 512;
  EXPECT_THROW(check_problem(wide), Error);
  wide.mask_function = nullptr;
  EXPECT_NO_THROW(check_problem(wide));
  Problem cache = problem(nullptr, &causal);
  cache.k.dtype = cache.v.dtype = DType::e4m3;
  cache.pages = {.table = &cache};
  EXPECT_THROW(check_problem(cache), Error);
  const std::vector<ConstTensor> captured{ConstTensor(&cache, DType::s8, {std::int64_t{1} << 31})};
  const Function long_read = Function::parse("ne(t0[k], 0)", Function::Kind::mask, captured);
  EXPECT_THROW(check_problem(problem(nullptr, &long_read)), Error);
}

}  // namespace
}  // namespace tandem
