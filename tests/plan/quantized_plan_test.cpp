// Every 8-bit Config that the table gives is one that can exist.
#include "plan/quantized_plan.hpp"

#include <gtest/gtest.h>

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

TEST(QuantizedPlan, EveryHeadDimensionAndRecipeGetsALegalConfig) {
  for (std::int64_t head_dim = 1; head_dim <= 256; ++head_dim) {
    for (const Recipe& recipe : {fp8_recipe, int8_recipe, int8_accurate_recipe, strict(int8_recipe)}) {
      for (const bool causal : {false, true}) {
        const QuantizedConfig c = choose_quantized_config(problem(head_dim, causal), recipe);
        ASSERT_EQ(quantized_objection(c), "") << head_dim << " " << causal;
        ASSERT_LE(c.promote_every, recipe.promote_every);
      }
    }
  }
}

TEST(QuantizedPlan, SumsProductsOfSeveralTilesWhereThereIsRoom) {
  Recipe every_four = fp8_recipe;
  every_four.promote_every = 4;
  for (const std::int64_t head_dim : {64, 128}) {
    const QuantizedConfig c = choose_quantized_config(problem(head_dim, false), every_four);
    EXPECT_EQ(c.promote_every, 4);
    EXPECT_EQ(c.parts, 1);
  }
  EXPECT_EQ(choose_quantized_config(problem(256, false), every_four).promote_every, 1);
  EXPECT_EQ(choose_quantized_config(problem(64, false), strict(every_four)).promote_every, 1);
}

TEST(QuantizedPlan, ObjectionsNameTheRule) {
  const auto objection = [](auto change) {
    QuantizedConfig c{.block_m = 192, .overlap = false, .parts = 1, .promote_every = 4};
    change(c);
    return quantized_objection(c);
  };
  EXPECT_EQ(objection([](QuantizedConfig&) {}), "");
  EXPECT_EQ(objection([](QuantizedConfig& c) { c.promote_every = 0; }), "promote_every 0 is less than 1");
  EXPECT_EQ(objection([](QuantizedConfig& c) { c.parts = 2; }), "promote_every above 1 takes parts 1, not 2");
  EXPECT_EQ(objection([](QuantizedConfig& c) { c.parts = 3; }),
            "parts 3 do not divide head_dim_v 128 into multiples of 16");
  EXPECT_EQ(objection([](QuantizedConfig& c) { c.overlap = true; }),
            "promote_every above 1 needs 176 registers a thread, 3 consumer warpgroups have 160");
  EXPECT_EQ(objection([](QuantizedConfig& c) { c.pv = Codes::s8; }),
            "promote_every above 1 takes P in e4m3 and scales of V by block: others weigh every tile anew");
  EXPECT_EQ(objection([](QuantizedConfig& c) {
              c.block_m = 128;
              c.head_dim_qk = c.head_dim_v = 256;
            }).substr(0, 6),
            "needs ");
}

}  // namespace
}  // namespace tandem
