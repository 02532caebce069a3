// Every backward Config that the heuristics can pick is one that can exist.
#include "ops/backward/plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace tandem {
namespace {

Problem problem(std::int64_t head_dim_qk, std::int64_t head_dim_v) {
  Problem p;
  p.pass = Pass::backward;
  p.batch = p.heads_q = p.heads_kv = 1;
  p.head_dim_qk = head_dim_qk;
  p.head_dim_v = head_dim_v;
  p.rows_q = p.rows_k = 1000;
  p.q.dtype = DType::bf16;
  return p;
}

TEST(BackwardPlan, EveryHeadDimensionGetsALegalConfigThatHoldsIt) {
  for (std::int64_t qk = 1; qk <= 256; ++qk) {
    for (std::int64_t v = 1; v <= 256; v += 5) {
      const BackwardConfig c = choose_backward_config(CallFacts(problem(qk, v)));
      ASSERT_EQ(backward_objection(c), "") << qk << " " << v;
      ASSERT_GE(c.tiling.head_dim_qk, qk);
      ASSERT_GE(c.tiling.head_dim_v, v);
      ASSERT_LT(c.tiling.head_dim_qk, qk + 64);
      ASSERT_LT(c.tiling.head_dim_v, v + 64);
    }
  }
}

TEST(BackwardPlan, TakesTheProblemsFeatures) {
  Problem p = problem(128, 96);
  const BackwardConfig plain = choose_backward_config(CallFacts(p));
  EXPECT_FALSE(plain.mask.causal || plain.mask.local || plain.transform != ScoreTransform::raw ||
               plain.mask.varlen || plain.schedule.deterministic);
  EXPECT_EQ(plain.tiling.element, Element::bf16);
  p.q.dtype = DType::f16;
  p.window_right = 0;
  p.window_left = 10;
  p.softcap = 2.0F;
  p.deterministic = true;
  const int lengths[] = {0, 1000};
  p.seqused_k.data = lengths;
  const BackwardConfig c = choose_backward_config(CallFacts(p));
  EXPECT_TRUE(c.mask.causal && c.mask.local && c.transform == ScoreTransform::softcap && c.mask.varlen &&
              c.schedule.deterministic);
  EXPECT_EQ(c.tiling.element, Element::f16);
  p.window_right = 999;  // not even the first query feels it
  p.window_left = 999;
  EXPECT_FALSE(choose_backward_config(CallFacts(p)).mask.causal ||
               choose_backward_config(CallFacts(p)).mask.local);
}

TEST(BackwardPlan, TakesTurnsWhereItPays) {
  Problem p = problem(128, 128);
  p.rows_q = p.rows_k = 511;
  EXPECT_FALSE(choose_backward_config(CallFacts(p)).schedule.pingpong);
  EXPECT_EQ(choose_backward_config(CallFacts(p)).q_stages, 2);
  p.rows_q = p.rows_k = 512;
  EXPECT_TRUE(choose_backward_config(CallFacts(p)).schedule.pingpong);
  EXPECT_EQ(choose_backward_config(CallFacts(p)).dout_stages, 3);
  p.window_right = 0;
  EXPECT_FALSE(choose_backward_config(CallFacts(p)).schedule.pingpong);
  p.rows_q = p.rows_k = 1024;
  EXPECT_TRUE(choose_backward_config(CallFacts(p)).schedule.pingpong);
  p.packed_q = true;
  p.batch = 2;  // 512 rows each
  EXPECT_FALSE(choose_backward_config(CallFacts(p)).schedule.pingpong);
  p = problem(64, 64);
  p.rows_q = p.rows_k = 512;
  EXPECT_TRUE(choose_backward_config(CallFacts(p)).schedule.pingpong);
  EXPECT_EQ(choose_backward_config(CallFacts(p)).dout_stages, 2);
  p.softcap = 2.0F;
  EXPECT_FALSE(choose_backward_config(CallFacts(p)).schedule.pingpong);
  p = problem(256, 256);
  p.rows_q = p.rows_k = 8192;
  EXPECT_FALSE(choose_backward_config(CallFacts(p)).schedule.pingpong);
}

TEST(BackwardPlan, RotatesFullAttentionInAFixedOrderAndWhereItPays) {
  Problem p = problem(64, 64);
  p.deterministic = true;
  EXPECT_TRUE(choose_backward_config(CallFacts(p)).schedule.staggered);
  p.window_right = 0;
  EXPECT_FALSE(choose_backward_config(CallFacts(p)).schedule.staggered);
  p.window_right = -1;
  p.window_left = 10;
  EXPECT_FALSE(choose_backward_config(CallFacts(p)).schedule.staggered);
  p.window_left = -1;
  const int lengths[] = {0, 1000};
  p.seqused_k.data = lengths;
  EXPECT_FALSE(choose_backward_config(CallFacts(p)).schedule.staggered);
  p = problem(128, 128);
  p.rows_q = p.rows_k = 1024;
  EXPECT_FALSE(choose_backward_config(CallFacts(p)).schedule.staggered);
  p.rows_q = p.rows_k = 2048;
  EXPECT_TRUE(choose_backward_config(CallFacts(p)).schedule.staggered);
  p = problem(256, 256);
  p.rows_q = p.rows_k = 8192;
  EXPECT_TRUE(choose_backward_config(CallFacts(p)).schedule.staggered);
  p.deterministic = true;  // 128 tiles in step wait for the slowest of them
  EXPECT_FALSE(choose_backward_config(CallFacts(p)).schedule.staggered);
}

TEST(BackwardPlan, EveryHeadDimensionHasALegalConfig) {
  for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
    for (const float softcap : {0.0F, 2.0F}) {
      for (const std::int64_t rows : {100, 8192}) {
        Problem p = problem(head_dim, head_dim);
        p.softcap = softcap;
        p.rows_q = p.rows_k = rows;
        EXPECT_EQ(backward_objection(choose_backward_config(CallFacts(p))), "") << head_dim << ' ' << softcap;
      }
    }
  }
}

TEST(BackwardPlan, RefusesWhatHopperCannotHold) {
  const auto refused = [](BackwardConfig c, const char* why) {
    EXPECT_NE(backward_objection(c).find(why), std::string::npos) << backward_objection(c);
  };
  refused({.tiling = {.head_dim_qk = 120}}, "head_dim 120 is not a multiple of 32");
  refused({.tiling = {.block_m = 96}}, "block_m 96");
  refused({.tiling = {.head_dim_qk = 96, .head_dim_v = 96, .block_m = 128}, .q_stages = 1, .dout_stages = 1},
          "registers");
  refused({.tiling = {.block_n = 96}}, "block_n 96");
  refused({.q_stages = 5}, "shared memory");
  refused({.q_stages = 0}, "less than 1");
  refused({.tiling = {.head_dim_qk = 96}}, "begin inside a strip");
  refused({.tiling = {.head_dim_qk = 192, .head_dim_v = 192}, .q_stages = 1, .dout_stages = 1}, "registers");
  refused({.dq_slices = 3}, "dq_slices 3");
  refused({.cluster = 2}, "cluster 2");
  refused({.q_stages = 1, .schedule = {.pingpong = true}}, "pingpong needs");
  refused({.dout_stages = 1, .schedule = {.pingpong = true}}, "pingpong needs");
  refused({.tiling = {.head_dim_qk = 256, .head_dim_v = 256, .block_n = 64},
           .cluster = 2,
           .dout_stages = 1,
           .dq_slices = 2,
           .schedule = {.pingpong = true}},
          "64 keys");
  refused({.mask = {.causal = true}, .schedule = {.staggered = true}}, "staggered");
  refused({.schedule = {.overlaps_tiles = true}}, "overlaps_tiles is of pingpong");
  refused({.mask = {.causal = true}, .schedule = {.turned = true}}, "turned is of pingpong");
  refused({.q_stages = 3, .dout_stages = 3, .schedule = {.pingpong = true, .overlaps_tiles = true}},
          "shared memory");
}

TEST(BackwardPlan, TilesOf64DimensionsMayOverlap) {
  BackwardConfig c{.tiling = {.head_dim_qk = 64, .head_dim_v = 64, .block_m = 128},
                   .q_stages = 3,
                   .schedule = {.pingpong = true, .overlaps_tiles = true}};
  EXPECT_EQ(backward_objection(c), "");
  c.functions = {.digest = 1, .mask_function = true};
  EXPECT_NE(backward_objection(c).find("without functions"), std::string::npos) << backward_objection(c);
}

TEST(BackwardPlan, LongCausalTilesOfGroupsAreTurned) {
  const auto turned = [](std::int64_t heads_kv, std::int64_t rows, int head_dim, bool causal, bool fixed) {
    Problem p = problem(head_dim, head_dim);
    p.heads_q = 8;
    p.heads_kv = heads_kv;
    p.rows_q = p.rows_k = rows;
    p.window_right = causal ? 0 : -1;
    p.deterministic = fixed;
    return choose_backward_config(CallFacts(p)).schedule.turned;
  };
  EXPECT_TRUE(turned(2, 16384, 128, true, false));
  EXPECT_FALSE(turned(8, 16384, 128, true, false));
  EXPECT_FALSE(turned(2, 8192, 128, true, false));
  EXPECT_FALSE(turned(2, 16384, 64, true, false));
  EXPECT_FALSE(turned(2, 16384, 128, false, false));
  EXPECT_FALSE(turned(2, 16384, 128, true, true));
}

TEST(BackwardPlan, ShippedConfigsAreLegalAndEachIsThereOnce) {
  const std::vector<BackwardConfig> configs = shipped_backward_configs();
  for (const BackwardConfig& c : configs) {
    EXPECT_EQ(backward_objection(c), "");
    EXPECT_EQ(std::count(configs.begin(), configs.end(), c), 1);
  }
  for (const int head_dim : {64, 128, 256}) {
    for (const int rows : {100, 512, 1024, 2048, 8192, 65536}) {
      for (const bool causal : {false, true}) {
        for (const bool deterministic : {false, true}) {
          Problem p = problem(head_dim, head_dim);
          p.rows_q = p.rows_k = rows;
          p.window_right = causal ? 0 : -1;
          p.deterministic = deterministic;
          EXPECT_EQ(std::count(configs.begin(), configs.end(), choose_backward_config(CallFacts(p))), 1)
              << head_dim << ' ' << rows << (causal ? " causal" : "");
        }
      }
    }
  }
}

TEST(BackwardPlan, ExplainsWhatItChose) {
  Problem p = problem(40, 64);
  p.deterministic = true;
  std::string text;
  for (const std::string& line : explain_backward(CallFacts(p), choose_backward_config(CallFacts(p))))
    text += line + "\n";
  EXPECT_NE(text.find("head_dim 40 padded to 64"), std::string::npos) << text;
  EXPECT_NE(text.find("fixed order"), std::string::npos) << text;
}

}  // namespace
}  // namespace tandem
