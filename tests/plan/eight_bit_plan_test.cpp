// Every 8-bit Config that the table gives is one that can exist.
#include "ops/eight_bit/plan.hpp"

#include <gtest/gtest.h>

#include "gpu/device.hpp"
#include "harness/error_of.hpp"
#include "problem/recipe_of.hpp"
#include "tandem/attention.hpp"

namespace tandem {
namespace {

Problem problem(std::int64_t head_dim, bool causal) {
  Problem p;
  p.batch = p.heads_q = p.heads_kv = 1;
  p.head_dim_qk = p.head_dim_v = head_dim;
  p.rows_q = p.rows_k = 1000;
  p.q.dtype = p.out.dtype = DType::bf16;
  if (causal) p.window_right = 0;
  return p;
}

TEST(EightBitPlan, EveryHeadDimensionAndRecipeGetsALegalConfig) {
  for (std::int64_t head_dim = 1; head_dim <= 256; ++head_dim) {
    for (const std::int64_t head_dim_v : {head_dim, 257 - head_dim}) {
      for (const Recipe& recipe : {fp8_recipe, int8_recipe, strict(fp8_recipe), strict(int8_recipe)}) {
        for (const bool causal : {false, true}) {
          Problem p = problem(head_dim, causal);
          p.head_dim_v = head_dim_v;
          const EightBitConfig c = choose_eight_bit_config(CallFacts(p), recipe);
          ASSERT_EQ(eight_bit_objection(c), "") << head_dim << ", " << head_dim_v << " " << causal;
        }
      }
    }
  }
}

TEST(EightBitPlan, PartsAreAsWideAsRegistersAllow) {
  const auto columns = [](std::int64_t head_dim, bool causal, const Recipe& recipe) {
    return choose_eight_bit_config(CallFacts(problem(head_dim, causal)), recipe).slice_columns();
  };
  for (const bool causal : {false, true}) {
    EXPECT_EQ(columns(160, causal, fp8_recipe), 160);
    EXPECT_EQ(columns(192, causal, fp8_recipe), 192);
    EXPECT_EQ(columns(224, causal, fp8_recipe), 112);
    for (const Recipe& recipe : {int8_recipe, strict(fp8_recipe), strict(int8_recipe)}) {
      EXPECT_EQ(columns(160, causal, recipe), 80);
      EXPECT_EQ(columns(224, causal, recipe), 32);  // in 112 or 224 they are in local memory
    }
  }
  for (const bool causal : {false, true}) EXPECT_EQ(columns(256, causal, fp8_recipe), 64);  // two in flight
}

/// Quantized values of the caller's, rows 256 bytes apart.
Problem quantized_problem(std::int64_t head_dim, bool causal) {
  alignas(16) static char memory[16];
  Problem p = problem(head_dim, causal);
  p.precision = Precision::fp8;
  p.q = p.k = p.v = {.data = memory,
                     .dtype = DType::e4m3,
                     .batch_stride = 256 * 1000,
                     .row_stride = 256,
                     .head_stride = 256};
  p.out.data = memory;
  return p;
}
EightBitConfig choose(const Problem& p) {
  return choose_eight_bit_config(CallFacts(p), recipe_of(p));
}

TEST(EightBitPlan, ReadsQuantizedValuesWhereTheyAreIfTmaCan) {
  for (std::int64_t head_dim = 1; head_dim <= 256; ++head_dim) {
    for (const bool causal : {false, true}) {
      const EightBitConfig c = choose(quantized_problem(head_dim, causal));
      ASSERT_EQ(eight_bit_objection(c), "") << head_dim << " " << causal;
      ASSERT_TRUE(c.in_place) << head_dim << " " << causal;
    }
  }
  const auto in_place = [](auto change) {
    Problem p = quantized_problem(128, false);
    change(p);
    return choose(p).in_place;
  };
  EXPECT_FALSE(in_place([](Problem& p) { p.v.row_stride = 264; }));
  EXPECT_FALSE(in_place([](Problem& p) { p.q.data = static_cast<char*>(p.q.data) + 8; }));
  EXPECT_FALSE(in_place([](Problem& p) { p.k_scale.group = ScaleGroup::row; }));
  EXPECT_FALSE(in_place([](Problem& p) { p.q.dtype = p.k.dtype = p.v.dtype = DType::s8; }));
  EXPECT_TRUE(in_place([](Problem& p) { p.k_scale.group = ScaleGroup::block; }));
}

/// Strips of V take shared memory, of which K and V then have one buffer less.
TEST(EightBitPlan, ReadsWideKeysInPlaceWithFewerStages) {
  Problem p = quantized_problem(256, true);
  p.head_dim_v = 128;
  p.window_left = 100;
  const EightBitConfig c = choose(p);
  EXPECT_TRUE(c.in_place);
  EXPECT_EQ(c.stages, 2);
  p.v.row_stride = 264;
  EXPECT_FALSE(choose(p).in_place);
  EXPECT_EQ(choose(p).stages, 3);
}

/// Their CTAs transpose unlike shares of V, so that equal tiles do not take equal time.
TEST(EightBitPlan, ReadsWideValuesInPlaceUnderTheDynamicScheduler) {
  const auto dynamic = [](int head_dim, std::int64_t padding) {
    Problem p = quantized_problem(head_dim, false);
    p.v.row_stride += padding;
    return choose(p).schedule.dynamic;
  };
  EXPECT_TRUE(dynamic(256, 0));
  EXPECT_FALSE(dynamic(256, 8)) << "V is arranged before";
  EXPECT_FALSE(dynamic(192, 0));
}

TEST(EightBitPlan, CapsScoresWhereAskedTo) {
  Problem p = problem(128, true);
  EXPECT_EQ(choose_eight_bit_config(CallFacts(p), int8_recipe).transform, ScoreTransform::raw);
  p.softcap = 15.0F;
  EXPECT_EQ(choose_eight_bit_config(CallFacts(p), int8_recipe).transform, ScoreTransform::softcap);
}

TEST(EightBitPlan, ExponentialsAreLinearWhereTheRecipeAllows) {
  const auto is_linear = [](const Recipe& recipe) {
    return choose_eight_bit_config(CallFacts(problem(128, false)), recipe).linear_exp2;
  };
  EXPECT_TRUE(is_linear(fp8_recipe));
  EXPECT_FALSE(is_linear(strict(fp8_recipe)));
  EXPECT_FALSE(is_linear(int8_recipe));
  EXPECT_TRUE(choose(quantized_problem(128, true)).linear_exp2);
}

TEST(EightBitPlan, WarpgroupsTakeTurnsWhereThatPays) {
  const auto takes_pingpong = [](std::int64_t head_dim, bool causal, const Recipe& recipe) {
    return choose_eight_bit_config(CallFacts(problem(head_dim, causal)), recipe).schedule.pingpong;
  };
  EXPECT_TRUE(takes_pingpong(64, false, fp8_recipe));
  EXPECT_TRUE(takes_pingpong(64, false, int8_recipe));
  EXPECT_FALSE(takes_pingpong(64, true, fp8_recipe));
  EXPECT_FALSE(takes_pingpong(128, false, fp8_recipe));
  EXPECT_FALSE(takes_pingpong(128, false, int8_recipe));
  EXPECT_FALSE(takes_pingpong(128, true, int8_recipe));
  const auto takes_pingpong_of_keys = [](std::int64_t head_dim, std::int64_t keys, const Recipe& recipe) {
    Problem p = problem(head_dim, true);
    p.rows_q = p.rows_k = keys;
    return choose_eight_bit_config(CallFacts(p), recipe).schedule.pingpong;
  };
  EXPECT_TRUE(takes_pingpong_of_keys(64, 6144, fp8_recipe));
  EXPECT_FALSE(takes_pingpong_of_keys(64, 6143, fp8_recipe));
  EXPECT_FALSE(takes_pingpong_of_keys(128, 6144, fp8_recipe));
  EXPECT_FALSE(takes_pingpong_of_keys(64, 6144, int8_recipe));
}

TEST(EightBitPlan, ObjectionsNameTheRule) {
  const auto objection = [](auto change) {
    EightBitConfig c{.tiling = {.block_m = 192}, .slices = 1, .schedule = {.overlap = false}};
    change(c);
    return eight_bit_objection(c);
  };
  EXPECT_EQ(objection([](EightBitConfig&) {}), "");
  EXPECT_EQ(objection([](EightBitConfig& c) { c.slices = 3; }),
            "slices 3 do not divide head_dim_v 128 into multiples of 16");
  EXPECT_EQ(objection([](EightBitConfig& c) {
              c.pv = OperandType::s8;
              c.linear_exp2 = true;
            }),
            "linear_exp2 takes P in e4m3 and scales of V by block");
  EXPECT_EQ(objection([](EightBitConfig& c) {
              c.in_place = true;
              c.rotated_v = true;
            }),
            "V that the kernel transposes is not rotated");
  EXPECT_EQ(objection([](EightBitConfig& c) {
              c.in_place = true;
              c.row_scales = true;
            }),
            "values in place are e4m3, with scales by block or larger: others are arranged before");
  EXPECT_EQ(objection([](EightBitConfig& c) { c.stages = 8; }),
            "needs 287744 bytes of shared memory, a block has 232448");
}

/// Nothing falls back to gradients in 16 bits, and the forward pass says so already.
TEST(EightBitPlan, SaysWhatHasNoGradientsIn8Bits) {
  const Device device{.kind = Device::Kind::cuda, .index = gpu::first_described};
  ForwardArgs args;
  args.q = args.k = args.v = ConstTensor(nullptr, DType::bf16, {2, 64, 8, 96}, device);
  args.out = Tensor(nullptr, DType::bf16, {2, 64, 8, 96}, device);
  args.options.precision = Precision::int8;
  EXPECT_NO_THROW(explain(args));
  args.options.backward_precision = Precision::int8;
  EXPECT_EQ(
      error_of(Status::unsupported, [&] { return explain(args); }),
      "backward_precision int8 has GPU kernels for head dimensions 64 and 128 alone, and the head dimensions "
      "are 96 and 96; leave it out, for gradients in 16 bits, or copy the tensors to the CPU");
}

}  // namespace
}  // namespace tandem
