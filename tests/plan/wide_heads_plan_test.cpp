// Heads of more than 256 dimensions: which Config they take, and where V is no tensor of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "gpu/kernel_spec.hpp"
#include "ops/forward/launch.hpp"
#include "ops/latent/plan.hpp"
#include "problem/effective.hpp"

namespace tandem {
namespace {

/// A step of latent attention, of `heads` query heads over one.
Problem latent(std::int64_t heads, std::int64_t queries, bool v_in_k) {
  static float memory[2];
  Problem p;
  p.batch = 2;
  p.heads_q = heads;
  p.heads_kv = 1;
  p.head_dim_qk = 576;
  p.head_dim_v = 512;
  p.rows_q = queries;
  p.rows_k = 4096;
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::bf16;
  p.k.data = memory;
  p.v.data = v_in_k ? memory : memory + 1;
  for (Operand* o : {&p.k, &p.v}) {
    o->row_stride = o->head_stride = 576;
    o->batch_stride = 576 * p.rows_k;
  }
  return p;
}

TEST(WideHeadsPlan, EveryHeadDimensionGetsALegalConfigThatHoldsIt) {
  for (std::int64_t qk = 8; qk <= max_gpu_wide_head_dim_qk; qk += 8) {
    for (std::int64_t v = 8; v <= max_gpu_wide_head_dim_v; v += 8) {
      if (std::max(qk, v) <= max_gpu_head_dim) continue;
      for (const bool v_in_k : {false, true}) {
        Problem p = latent(8, 100, v_in_k);
        p.head_dim_qk = qk;
        p.head_dim_v = v;
        const LatentConfig c = choose_latent_config(CallFacts(p));
        ASSERT_EQ(forward_objection(c), "") << qk << " " << v;
        ASSERT_TRUE(CallFacts(p).wide_heads);
        ASSERT_EQ(c.v_in_k, v_in_k && v <= qk);
        ASSERT_GE(c.tiling.head_dim_qk, qk);
        ASSERT_GE(c.tiling.head_dim_v, v);
      }
    }
  }
}

TEST(WideHeadsPlan, HeadsOfLatentAttentionAreRowsOfTilesOf64) {
  const LatentConfig c = choose_latent_config(CallFacts(latent(128, 1, true)));
  EXPECT_TRUE(c.tiling.heads_as_rows);
  EXPECT_TRUE(c.schedule.split);
  EXPECT_EQ(c.stages, 2);
  EXPECT_EQ(best_head_rows(latent(128, 1, true)).heads, 64) << "two tiles";
  Problem p = latent(128, 1, true);
  fold_heads_into_rows(p);
  EXPECT_EQ(p.rows_q, 1) << "they would be more rows than a tile has";
  p = latent(16, 1, true);
  fold_heads_into_rows(p);
  EXPECT_EQ(p.rows_q, 16);
}

/// Tiles of the same keys have a cluster of two CTAs where they are an even number.
TEST(WideHeadsPlan, TwoTilesOfHeadsThatShareKeysAreAPair) {
  const auto pairs = [](std::int64_t heads, std::int64_t queries) {
    const LatentConfig c = choose_latent_config(CallFacts(latent(heads, queries, true)));
    EXPECT_EQ(forward_objection(c), "");
    EXPECT_EQ(combine_config(c).pairs, c.pairs);
    EXPECT_EQ(gpu::kernels::forward_wide.block(c).cluster, c.pairs ? 2 : 1);
    return c.pairs;
  };
  EXPECT_TRUE(pairs(128, 1));
  EXPECT_TRUE(pairs(128, 2));
  EXPECT_TRUE(pairs(40, 3)) << "twenty heads of three queries a tile";
  EXPECT_TRUE(pairs(256, 1)) << "two pairs";
  EXPECT_FALSE(pairs(64, 1));
  EXPECT_FALSE(pairs(16, 4));
  EXPECT_FALSE(pairs(192, 1)) << "three tiles";
  EXPECT_FALSE(choose_latent_config(CallFacts(latent(128, 1, false))).pairs)
      << "two tensors take all shared memory";
  Problem p = latent(128, 1, true);
  p.split_size = 1024;
  EXPECT_FALSE(choose_latent_config(CallFacts(p)).pairs);
  p = latent(128, 1, true);
  p.batch = 1024;
  EXPECT_FALSE(choose_latent_config(CallFacts(p)).schedule.split);
  EXPECT_FALSE(choose_latent_config(CallFacts(p)).pairs);
}

TEST(WideHeadsPlan, SharesOfPairsAreThoseOfClusters) {
  Problem p = latent(128, 1, true);
  const LatentConfig c = choose_latent_config(CallFacts(p));
  LatentConfig single = c;
  single.pairs = false;
  const gpu::WorkDivision one = gpu::divide_work(p, single, 132);
  gpu::WorkDivision two = gpu::divide_work(p, c, 132);
  EXPECT_EQ(one.most_ctas, one.ctas);
  EXPECT_EQ(two.most_ctas, two.ctas / 2);
  EXPECT_EQ(two.few_ctas, two.most_ctas);
  EXPECT_EQ(two.least, one.least);
  EXPECT_EQ(two.ctas, 64) << "64 blocks of each of two sequences, four a share";
  EXPECT_EQ(two.part_sums, 2 * 64 * 64);
  EXPECT_EQ(two.combine_ctas, one.combine_ctas);
  p.batch = 100;
  two = gpu::divide_work(p, c, 132);
  EXPECT_EQ(two.ctas, 132);
  EXPECT_EQ(two.part_sums, 2 * 132 * 64);
  EXPECT_EQ(gpu::divide_work(p, c, 5).ctas, 4) << "a multiprocessor is left over";
  p.batch = 1;
  p.rows_k = 100;
  two = gpu::divide_work(p, c, 132);
  EXPECT_EQ(two.ctas, 2);
  EXPECT_EQ(two.combine_ctas, 0) << "one cluster has both tiles whole";
}

TEST(WideHeadsPlan, ExplainSaysWhatAClusterDoes) {
  const auto said = [](std::int64_t heads) {
    const CallFacts facts(latent(heads, 1, true));
    const std::vector<std::string> lines = explain_forward(facts, choose_latent_config(facts));
    return std::ranges::any_of(lines, [](const std::string& line) {
      return line.find("a cluster of two CTAs") != std::string::npos;
    });
  };
  EXPECT_TRUE(said(128));
  EXPECT_FALSE(said(64));
}

/// What bits depend on is the same of a step and of a prefill.
TEST(WideHeadsPlan, AFixedSplitSizeChangesNothingButTheSplits) {
  for (const bool v_in_k : {false, true}) {
    Problem step = latent(128, 1, v_in_k);
    step.split_size = 1024;
    Problem prefill = latent(128, 3000, v_in_k);
    prefill.split_size = 1024;
    const LatentConfig few = choose_latent_config(CallFacts(step));
    const LatentConfig many = choose_latent_config(CallFacts(prefill));
    EXPECT_TRUE(few.schedule.invariant && few.schedule.split);
    EXPECT_TRUE(many.schedule.invariant && !many.schedule.split);
    EXPECT_EQ(few.tiling.block_n, many.tiling.block_n);
    EXPECT_EQ(few.v_in_k, many.v_in_k);
    for (const LatentConfig& c : {few, many}) EXPECT_EQ(forward_objection(c), "");
  }
}

TEST(WideHeadsPlan, StepsOfLatentAttentionAreShipped) {
  const std::vector<LatentConfig> configs = shipped_latent_configs();
  for (const bool pages : {false, true}) {
    for (const auto& [heads, queries] : {std::pair<int, int>{128, 1}, {128, 2}, {16, 5}, {64, 2}}) {
      Problem p = latent(heads, queries, true);
      if (pages) {
        p.pages.table = &p;
        p.pages.page_size = 64;
      }
      p.seqused_k.data = &p;
      const LatentConfig c = choose_latent_config(CallFacts(p));
      EXPECT_NE(std::find(configs.begin(), configs.end(), c), configs.end())
          << pages << " " << heads << " " << queries;
    }
  }
}

TEST(WideHeadsPlan, ValuesAreInKeysIfAddressAndStridesAre) {
  EXPECT_TRUE(has_values_in_keys(latent(4, 1, true)));
  EXPECT_FALSE(has_values_in_keys(latent(4, 1, false)));
  Problem p = latent(4, 1, true);
  p.v.row_stride = 512;
  EXPECT_FALSE(has_values_in_keys(p));
  p = latent(4, 1, true);
  p.head_dim_v = 640;
  EXPECT_FALSE(has_values_in_keys(p));
}

TEST(WideHeadsLegality, NamesTheRuleThatIsBroken) {
  const auto objection = [](auto change) {
    LatentConfig c = choose_latent_config(CallFacts(latent(128, 1, true)));
    change(c);
    return forward_objection(c);
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_EQ(objection([](LatentConfig&) {}), "");
  EXPECT_TRUE(has(objection([](LatentConfig& c) { c.stages = 1; }), "two stages"));
  EXPECT_TRUE(has(objection([](LatentConfig& c) { c.tiling.head_dim_v = 448; }), "448"));
  EXPECT_TRUE(has(objection([](LatentConfig& c) { c.tiling.block_m = 128; }), "128 x 64"));
  EXPECT_TRUE(has(objection([](LatentConfig& c) {
                    c.mask.causal = false;
                    c.mask.by_sequence = true;
                  }),
                  "takes causal"));
  EXPECT_TRUE(has(objection([](LatentConfig& c) { c.v_in_k = c.pairs = false; }), "shared memory"));
  EXPECT_TRUE(has(objection([](LatentConfig& c) { c.v_in_k = false; }), "pairs of tiles"));
  EXPECT_TRUE(has(objection([](LatentConfig& c) { c.schedule.split = false; }), "pairs of tiles"));
  EXPECT_TRUE(has(objection([](LatentConfig& c) { c.schedule.invariant = true; }), "pairs of tiles"));
  EXPECT_TRUE(has(objection([](LatentConfig& c) { c.tiling.heads_as_rows = false; }), "pairs of tiles"));
}

}  // namespace
}  // namespace tandem
