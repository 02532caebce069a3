// The forward pass of quantized values and scales that the caller brings: what quantize and the recipe
// without its rotation and mean give from 16 bits, bit for bit.
#include <gtest/gtest.h>

#include <cmath>

#include "api/make_problem.hpp"
#include "cpu/cpu.hpp"
#include "harness/changes.hpp"
#include "harness/environment.hpp"
#include "harness/quantized.hpp"
#include "harness/recipe_reference.hpp"
#include "harness/runner.hpp"

namespace tandem::harness {
namespace {

Case grouped_case() {
  Case c = with({}, {.dtype = DType::bf16, .batch = 2, .heads_q = 4, .heads_kv = 2, .head_dim_qk = 72});
  change(c, {.head_dim_v = 40, .seqlen_q = 150, .seqlen_k = 300, .causal = true});
  return c;
}

std::vector<std::byte> bits_of_quantized(Call call, DType dtype, Granularity granularity) {
  quantize_inputs(call, dtype, granularity);
  call.prepare(Pass::forward);
  forward(call.forward_args(), Execution{.threads = 1});
  return call.out.raw();
}

std::vector<std::byte> bits_of_recipe(Call call, OperandType type, ScaleGroup group) {
  call.spec.options.precision = Precision::fp8;  // the recipe says the rest
  call.prepare(Pass::forward);
  const Problem problem = make_problem(call.forward_args());
  cpu::Config config = cpu::choose(problem, 1);
  config.recipe = {.qk = type,
                   .pv = type,
                   .qk_scales = group,
                   .v_scales = group,
                   .rotate_qk = false,
                   .rotate_v = false,
                   .smooth_k = false,
                   .linear_exp2 = type == OperandType::e4m3 && group != ScaleGroup::row};
  const cpu::Plan plan(problem, config);
  std::vector<std::byte> workspace(plan.workspace_bytes);
  cpu::run(plan, workspace);
  return call.out.raw();
}

TEST(QuantizedInput, AreAttendedToAsTheRecipeDoes) {
  const Call call(grouped_case());
  for (const auto& [granularity, group] : {std::pair{Granularity::tensor, ScaleGroup::tensor},
                                           {Granularity::head, ScaleGroup::head},
                                           {Granularity::block, ScaleGroup::block},
                                           {Granularity::row, ScaleGroup::row}}) {
    SCOPED_TRACE(static_cast<int>(granularity));
    EXPECT_EQ(bits_of_quantized(call, DType::e4m3, granularity),
              bits_of_recipe(call, OperandType::e4m3, group));
  }
  EXPECT_EQ(bits_of_quantized(call, DType::s8, Granularity::row),
            bits_of_recipe(call, OperandType::s8, ScaleGroup::row));
}

/// Tiles of a matrix unit have the rows of several blocks, each with a scale of its own.
TEST(QuantizedInput, OfWholeNumbersFollowTheRecipe) {
  Case c = grouped_case();
  c.options.precision = Precision::int8;
  for (const cpu::Target target : cpu::available_targets()) {
    SCOPED_TRACE(cpu::name_of(target));
    const Environment environment("TANDEM_CPU_TARGET", cpu::name_of(target));
    for (const Granularity granularity : {Granularity::head, Granularity::block, Granularity::row}) {
      Call call(c);
      quantize_inputs(call, DType::s8, granularity);
      call.ask_for_max_logits();
      call.prepare(Pass::forward);
      forward(call.forward_args(), Execution{.threads = 1});
      EXPECT_TRUE(follows_recipe(call, expect_recipe(call)));
    }
  }
}

TEST(QuantizedInput, OfPackedSequencesHaveScalesByRow) {
  Case c = with(grouped_case(), {.batch = 3, .packed = true, .lengths_q = {40, 0, 131}});
  change(c, {.lengths_k = {130, 7, 140}, .slack_k = 3});
  const Call call(c);
  EXPECT_EQ(bits_of_quantized(call, DType::e4m3, Granularity::row),
            bits_of_recipe(call, OperandType::e4m3, ScaleGroup::row));
  EXPECT_EQ(bits_of_quantized(call, DType::s8, Granularity::row),
            bits_of_recipe(call, OperandType::s8, ScaleGroup::row));
}

/// A scale's sign is its quantized values': results are those of the other signs.
TEST(QuantizedInput, TakeTheSignOfTheirScales) {
  Call call(grouped_case());
  quantize_inputs(call, DType::e4m3, Granularity::block);
  const auto run = [&call] {
    call.prepare(Pass::forward);
    forward(call.forward_args(), Execution{.threads = 1});
    return call.out.raw();
  };
  const std::vector<std::byte> plain = run();
  for (Box* box : {&call.k, &call.k_scale, &call.v, &call.v_scale}) {
    for (std::int64_t i = 0; i < box->numel(); ++i) box->set(i, -box->get(i));
  }
  EXPECT_EQ(run(), plain);
}

/// A group of zeros may have a scale of either zero.
TEST(QuantizedInput, TakeAScaleOfMinusZero) {
  for (const DType dtype : {DType::e4m3, DType::s8}) {
    for (const Granularity granularity : {Granularity::block, Granularity::row}) {
      Call call(grouped_case());
      quantize_inputs(call, dtype, granularity);
      const auto run = [&call](double zero) {
        for (Box* scales : {&call.q_scale, &call.k_scale, &call.v_scale}) scales->set(1, zero);
        call.prepare(Pass::forward);
        forward(call.forward_args(), Execution{.threads = 1});
        return call.out.raw();
      };
      const std::vector<std::byte> plain = run(0.0);
      for (std::int64_t i = 0; i < call.out.numel(); ++i) ASSERT_FALSE(std::isnan(call.out.get(i)));
      EXPECT_EQ(run(-0.0), plain);
    }
  }
}

/// 16-bit queries on 8-bit keys and values with scales by block or row: the result on what the values stand
/// for, bit for bit.
void check_mixed(const Case& c, DType type, Granularity granularity) {
  SCOPED_TRACE(c.describe());
  Call mixed(c);
  quantize_keys_and_values(mixed, type, granularity);
  Call want = dequantized(mixed);
  for (Call* call : {&mixed, &want}) {
    call->prepare(Pass::forward);
    runners().front()->forward(*call);
  }
  EXPECT_EQ(mixed.out.raw(), want.out.raw());
  EXPECT_EQ(mixed.lse.raw(), want.lse.raw());
  EXPECT_TRUE(mixed.out.changed_outside().empty());
}

/// The same with one scale for k, which is a factor of the logits, and a power of two for v, which rounds
/// nothing: the result on the quantized values as numbers of q's dtype, bit for bit.
void check_factors(const Case& c, DType type) {
  SCOPED_TRACE(c.describe());
  Call mixed(c);
  quantize_keys_and_values(mixed, type, Granularity::tensor);
  mixed.k_scale.set(0, 0.037);
  mixed.v_scale.set(0, 0.25);
  Call want = mixed;
  want.k_scale.set(0, 1.0);
  want = dequantized(want);
  const float scale = c.options.scale.value_or(1.0F / std::sqrt(static_cast<float>(c.head_dim_qk)));
  want.spec.options.scale = scale * static_cast<float>(mixed.k_scale.get(0));
  for (Runner* runner : runners()) {
    for (Call* call : {&mixed, &want}) {
      call->prepare(Pass::forward);
      runner->forward(*call);
    }
    EXPECT_EQ(mixed.out.raw(), want.out.raw()) << runner->name();
    EXPECT_EQ(mixed.lse.raw(), want.lse.raw()) << runner->name();
    EXPECT_TRUE(mixed.out.changed_outside().empty());
  }
}

TEST(MixedInput, WithOneScaleAreAttendedToWithoutRounding) {
  for (const DType type : {DType::e4m3, DType::s8}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      for (const std::int64_t seqlen_q : {1, 3, 150}) {
        Case c = with(grouped_case(), {.dtype = dtype, .seqlen_q = seqlen_q});
        check_factors(c, type);
        change(c, {.head_dim_qk = 128, .head_dim_v = 35, .used_k = {1, 299}});
        check_factors(c, type);
      }
    }
  }
}

/// A scale of each (batch, kv head) is that head's one scale.
TEST(MixedInput, WithScalesByHeadAreThoseOfEachHead) {
  for (const std::int64_t seqlen_q : {2, 150}) {
    Case c = with(grouped_case(), {.batch = 1, .seqlen_q = seqlen_q});
    Call all(c);
    quantize_keys_and_values(all, DType::e4m3, Granularity::head);
    all.prepare(Pass::forward);
    runners().front()->forward(all);
    for (const std::int64_t kv_head : {0, 1}) {
      Call one = all;
      one.k_scale = Box(DType::f32, {1}, {}, false);
      one.v_scale = Box(DType::f32, {1}, {}, false);
      one.k_scale.set(0, all.k_scale.get(kv_head));
      one.v_scale.set(0, all.v_scale.get(kv_head));
      one.out = Box(c.dtype, {1, seqlen_q, c.heads_q, c.head_dim_v}, {}, true);
      one.lse = Box(DType::f32, {1, c.heads_q, seqlen_q}, {}, true);
      one.prepare(Pass::forward);
      runners().front()->forward(one);
      for (std::int64_t n = 0; n < all.out.numel(); ++n) {
        if (n / c.head_dim_v % c.heads_q / 2 != kv_head) continue;
        ASSERT_EQ(all.out.get(n), one.out.get(n)) << n;
      }
    }
  }
}

TEST(MixedInput, AreAttendedToAsTheirValues) {
  Case c = grouped_case();
  for (const DType type : {DType::e4m3, DType::s8}) {
    for (const Granularity g : {Granularity::block, Granularity::row}) check_mixed(c, type, g);
  }
  change(c, {.dtype = DType::f16, .softcap = 5.0F, .threads = 2});
  check_mixed(c, DType::e4m3, Granularity::block);
  change(c, {.dtype = DType::f32, .used_k = {211, 0}});
  check_mixed(c, DType::e4m3, Granularity::row);
  c.seqlen_q = 1;  // a step of decoding
  c.head_dim_v = 35;
  check_mixed(c, DType::s8, Granularity::row);
}

TEST(MixedInput, OfPackedSequencesAndAnyLayout) {
  Case c = with(grouped_case(), {.batch = 3, .packed = true, .lengths_q = {40, 0, 131}});
  change(c, {.lengths_k = {130, 7, 140}, .slack_k = 3, .used_k = {130, 3, 77}});
  c.k.pad = 3;
  c.k.base_offset = 1;
  c.v.order = {1, 0, 2};
  c.v.base_offset = 5;
  check_mixed(c, DType::e4m3, Granularity::row);
  check_mixed(c, DType::s8, Granularity::row);
}

}  // namespace
}  // namespace tandem::harness
