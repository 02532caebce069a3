// Every Config that the heuristics can pick is one that can exist.
#include "ops/decode/plan.hpp"
#include "ops/forward/plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "ops/forward/launch.hpp"

namespace tandem {
namespace {

Problem problem(std::int64_t head_dim_qk, std::int64_t head_dim_v, std::int64_t rows_q = 1000,
                std::int64_t rows_k = 1000) {
  Problem p;
  p.batch = p.heads_q = p.heads_kv = 1;
  p.head_dim_qk = head_dim_qk;
  p.head_dim_v = head_dim_v;
  p.rows_q = rows_q;
  p.rows_k = rows_k;
  p.q.dtype = p.out.dtype = DType::bf16;
  return p;
}

TEST(ForwardPlan, EveryHeadDimensionGetsALegalConfigThatHoldsIt) {
  for (std::int64_t qk = 1; qk <= 256; ++qk) {
    for (std::int64_t v = 1; v <= 256; v += 5) {
      for (const bool causal : {false, true}) {
        Problem p = problem(qk, v);
        if (causal) p.window_right = 0;
        const ForwardConfig c = choose_forward_config(CallFacts(p));
        ASSERT_EQ(forward_objection(c), "") << qk << " " << v;
        ASSERT_GE(c.tiling.head_dim_qk, qk);
        ASSERT_GE(c.tiling.head_dim_v, v);
        ASSERT_LT(c.tiling.head_dim_qk, qk + 32);
        ASSERT_LT(c.tiling.head_dim_v, v + 32);
      }
    }
  }
}

TEST(ForwardPlan, EveryTileIsLegalAtItsWidest) {
  for (const ForwardTileLine& tile : forward_tiles()) {
    ForwardConfig c;
    c.tiling.head_dim_qk = tile.head_dim_qk;
    c.tiling.head_dim_v = tile.head_dim_v;
    c.tiling.block_m = tile.block_m;
    c.tiling.block_n = tile.block_n;
    c.stages = tile.stages;
    c.q_stages = tile.q_stages;
    c.teams = tile.teams;
    c.schedule.dynamic = tile.dynamic;
    c.schedule.output_late = tile.output_late;
    c.schedule.own_blocks = tile.own_blocks;
    c.schedule.pingpong = tile.pingpong;
    EXPECT_EQ(forward_objection(c), "") << tile.head_dim_qk << " " << tile.head_dim_v;
  }
}

TEST(ForwardPlan, ShippedConfigsAreLegalAndDifferent) {
  const std::vector<ForwardConfig> configs = shipped_forward_configs();
  for (auto c = configs.begin(); c != configs.end(); ++c) {
    EXPECT_EQ(forward_objection(*c), "");
    EXPECT_EQ(std::find(c + 1, configs.end(), *c), configs.end());
  }
}

TEST(ForwardPlan, UsualModelsAreShipped) {
  const std::vector<ForwardConfig> configs = shipped_forward_configs();
  for (const std::int64_t head_dim : {64, 96, 128, 256}) {
    for (const bool causal : {false, true}) {
      Problem p = problem(head_dim, head_dim);
      if (causal) p.window_right = 0;
      EXPECT_NE(std::find(configs.begin(), configs.end(), choose_forward_config(CallFacts(p))), configs.end())
          << head_dim;
    }
  }
}

/// What a call's mask and output are is a matter of the Config's, not of its tile.
TEST(ForwardPlan, AMaskBySequenceAndAnOutInF32ChangeNothingElse) {
  const std::int32_t flags[2] = {};
  for (const std::int64_t queries : {2, 40, 1000}) {
    Problem p = problem(128, 128, queries, 4096);
    p.window_right = 0;
    ForwardConfig expected = choose_forward_config(CallFacts(p));
    p.window_right = -1;
    p.causal_by_sequence.data = flags;
    p.out.dtype = DType::f32;
    const ForwardConfig c = choose_forward_config(CallFacts(p));
    EXPECT_EQ(forward_objection(c), "");
    expected.mask.by_sequence = expected.tiling.f32_out = true;
    EXPECT_EQ(c, expected) << queries;
    EXPECT_EQ(combine_config(c).tiling.f32_out, true) << "the merged result is in f32, too";
  }
}

TEST(ForwardPlan, StepsOfGenerationAreShipped) {
  const std::vector<ForwardConfig> configs = shipped_forward_configs();
  const std::int32_t lengths[2] = {};
  for (const std::int64_t head_dim : {64, 128}) {
    for (const std::int64_t queries : {1, 4}) {
      for (const bool pages : {false, true}) {
        Problem p = problem(head_dim, head_dim, queries, 4096);
        p.window_right = queries > 1 ? 0 : -1;
        p.seqused_k.data = lengths;
        if (pages) p.pages = {.table = lengths, .count = 9, .page_size = 16};
        EXPECT_NE(std::find(configs.begin(), configs.end(), choose_forward_config(CallFacts(p))),
                  configs.end())
            << head_dim << " " << queries << " " << pages;
      }
    }
  }
}

TEST(ForwardPlan, PagesBehindPaddingAreLoadedByRows) {
  const std::int32_t lengths[2] = {};
  Problem p = problem(96, 96, 1, 4096);
  p.pages = {.table = lengths, .count = 9, .page_size = 64};
  EXPECT_EQ(gpu::forward_tensor_map(p, choose_forward_config(CallFacts(p)).tiling, gpu::Loaded::k).box[1],
            64);
  p.leftpad_k.data = lengths;
  const ForwardConfig c = choose_forward_config(CallFacts(p));
  EXPECT_EQ(c.keys, KeySource::padded_pages);
  EXPECT_EQ(c.tiling.head_dim_qk, 128) << "TMA writes to multiples of 128 bytes";
  EXPECT_EQ(gpu::forward_tensor_map(p, c.tiling, gpu::Loaded::k).box[1], 1);
}

TEST(ForwardPlan, PromptsOnSmallPagesAreGathered) {
  const std::int32_t lengths[2] = {};
  Problem p = problem(128, 128, 4096, 4096);
  const auto keys_on = [&](std::int64_t page_size) {
    p.pages = {.table = lengths, .count = 9, .page_size = page_size};
    return choose_forward_config(CallFacts(p)).keys;
  };
  EXPECT_EQ(keys_on(1), KeySource::gathered_pages);
  EXPECT_EQ(keys_on(most_gathered_page), KeySource::gathered_pages);
  EXPECT_EQ(keys_on(most_gathered_page + 1), KeySource::pages);
  p.leftpad_k.data = lengths;
  EXPECT_EQ(keys_on(16), KeySource::padded_pages);
  p = problem(64, 64, 4096, 4096);
  EXPECT_EQ(keys_on(64), KeySource::pages);
  EXPECT_EQ(choose_forward_config(CallFacts(p)).teams, 2);
  EXPECT_EQ(keys_on(16), KeySource::gathered_pages);
  EXPECT_EQ(choose_forward_config(CallFacts(p)).tiling.block_m, 128) << "more warpgroups leave no registers";
  p = problem(96, 96, 4096, 4096);
  EXPECT_EQ(keys_on(16), KeySource::pages) << "a row of 96 columns is no whole number of swizzled ones";
  p = problem(128, 128, 4096, 4096);
  p.split_size = 256;
  EXPECT_EQ(keys_on(16), KeySource::pages);
}

TEST(ForwardPlan, MasksThatNoQueryFeelsAreDropped) {
  Problem p = problem(128, 128, 1, 5000);
  p.window_right = 0;
  EXPECT_FALSE(choose_forward_config(CallFacts(p)).mask.causal) << "one query sees every key";
  p = problem(128, 128, 100, 100);
  p.window_right = 98;
  EXPECT_TRUE(choose_forward_config(CallFacts(p)).mask.causal) << "query 0 does not see key 99";
  p.window_right = 99;
  EXPECT_FALSE(choose_forward_config(CallFacts(p)).mask.causal);
  p.window_left = 98;
  EXPECT_TRUE(choose_forward_config(CallFacts(p)).mask.local) << "query 99 does not see key 0";
  p.window_left = 99;
  EXPECT_FALSE(choose_forward_config(CallFacts(p)).mask.local);
}

TEST(ForwardPlan, ScoresAreTransformedAsScaleAndSoftcapAsk) {
  Problem p = problem(64, 64);
  EXPECT_EQ(choose_forward_config(CallFacts(p)).transform, ScoreTransform::raw);
  for (const float scale : {0.0F, -1.0F}) {
    p.scale = scale;
    EXPECT_EQ(choose_forward_config(CallFacts(p)).transform, ScoreTransform::scaled);
  }
  p.softcap = 30.0F;
  EXPECT_EQ(choose_forward_config(CallFacts(p)).transform, ScoreTransform::softcap);
}

TEST(ForwardPlan, LengthsOnTheDeviceMakeItVarlen) {
  const std::int32_t lengths[2] = {};
  for (Lengths Problem::*member :
       {&Problem::cu_seqlens_q, &Problem::cu_seqlens_k, &Problem::seqused_q, &Problem::seqused_k}) {
    Problem p = problem(64, 64);
    EXPECT_FALSE(choose_forward_config(CallFacts(p)).mask.varlen);
    (p.*member).data = lengths;
    EXPECT_TRUE(choose_forward_config(CallFacts(p)).mask.varlen);
  }
}

TEST(ForwardPlan, PackedSequencesGetTheTileOfTheirMeanLength) {
  const std::int32_t lengths[2] = {};
  const auto block_m = [&](std::int64_t batch, bool packed) {
    Problem p = problem(64, 64, 16384, 16384);
    p.batch = batch;
    p.packed_q = p.packed_k = packed;
    (packed ? p.cu_seqlens_k : p.seqused_k).data = lengths;
    return choose_forward_config(CallFacts(p)).tiling.block_m;
  };
  EXPECT_EQ(block_m(1, true), 192);
  EXPECT_EQ(block_m(2, true), 192);   // 8192 keys each
  EXPECT_EQ(block_m(3, true), 128);   // 5461
  EXPECT_EQ(block_m(1, false), 128);  // as many as 16384, or none
  EXPECT_EQ(block_m(0, true), 192);   // no sequences: anything, without a division by 0
}

TEST(ForwardPlan, WideHeadsTakeFewerKeysABlockWhereSequencesAreShort) {
  const auto config = [](std::int64_t keys) {
    return choose_forward_config(CallFacts(problem(256, 256, keys, keys)));
  };
  EXPECT_EQ(config(512).tiling.block_n, 64);
  EXPECT_EQ(config(1024).tiling.block_n, 80);
  EXPECT_TRUE(config(512).schedule.pingpong && config(2048).schedule.pingpong);
  EXPECT_FALSE(config(4096).schedule.pingpong);
}

/// Tiles of causal sequences whose queries see as many keys on average, but of short ones none.
TEST(ForwardPlan, AWindowGetsTheTileOfItsWidth) {
  const auto config = [](std::int64_t head_dim, std::int64_t left) {
    Problem p = problem(head_dim, head_dim, 16384, 16384);
    p.window_left = left;
    p.window_right = 0;
    return choose_forward_config(CallFacts(p));
  };
  EXPECT_EQ(config(96, -1).tiling.block_n, 96);
  EXPECT_EQ(config(96, 1023).tiling.block_n, 96);
  EXPECT_EQ(config(96, 255).tiling.block_n, 64);
  EXPECT_EQ(config(128, 0).tiling.block_m, 192) << "that of 512 keys, not of 2";
}

/// Functions and gathered pages have one team, and varlen warpgroups in step.
TEST(ForwardPlan, TeamsAndOwnBlocksAreWhereTheKernelAllowsThem) {
  const std::int32_t lengths[2] = {};
  for (const bool causal : {false, true}) {
    Problem p = problem(64, 64, 512, 512);
    if (causal) p.window_right = 0;
    const ForwardConfig c = choose_forward_config(CallFacts(p));
    EXPECT_EQ(c.teams, 2);
    EXPECT_EQ(c.schedule.own_blocks, causal);
    p.seqused_k.data = lengths;
    const ForwardConfig varlen = choose_forward_config(CallFacts(p));
    EXPECT_EQ(varlen.teams, 2);
    EXPECT_FALSE(varlen.schedule.own_blocks);
    p.pages = {.table = lengths, .count = 9, .page_size = 16};
    const ForwardConfig gathered = choose_forward_config(CallFacts(p));
    EXPECT_EQ(gathered.teams, 1);
    EXPECT_TRUE(gathered.gathers());
    p.pages.page_size = 64;
    EXPECT_EQ(choose_forward_config(CallFacts(p)).teams, 2);
  }
}

/// What bits depend on is the same for every call of a model: only who computes what may differ.
TEST(ForwardPlan, ASplitSizeFixesBlocksOfKeysByTheModelAlone) {
  for (const auto& [qk, v, block_n] :
       std::vector<std::array<int, 3>>{{64, 64, 128}, {128, 128, 128}, {192, 128, 64}, {256, 256, 64}}) {
    for (const std::int64_t queries : {1, 5, 64, 700}) {
      for (const std::int64_t batch : {1, 600}) {
        for (const std::int64_t keys : {100, 5000}) {
          Problem p = problem(qk, v, queries, keys);
          p.batch = batch;
          p.split_size = 1024;
          const ForwardConfig c = choose_forward_config(CallFacts(p));
          EXPECT_EQ(forward_objection(c), "");
          EXPECT_EQ(c.tiling.block_n, block_n);
          EXPECT_TRUE(c.schedule.invariant);
          EXPECT_EQ(c.schedule.split, queries <= 64 && keys > 1024 && batch == 1);
          EXPECT_TRUE(c.stages >= 2 || qk == 256);
        }
      }
    }
  }
}

TEST(ForwardPlan, PartsOfSplitsHaveAsManyPlacesAsThereAre) {
  Problem p = problem(128, 128, 4, 5000);
  p.heads_q = p.heads_kv = 8;
  p.batch = 2;
  p.split_size = 1024;
  const ForwardConfig c = choose_forward_config(CallFacts(p));
  const gpu::WorkDivision work = gpu::divide_work(p, c, 132);
  EXPECT_EQ(work.ctas, 2 * 8 * 5);  // tiles, splits
  EXPECT_EQ(work.split_blocks, 8);
  EXPECT_EQ(work.part_rows, 4);
  EXPECT_EQ(work.part_sums, 80 * 4);
  EXPECT_EQ(work.part_outputs, 80 * 4 * 128);
  EXPECT_EQ(work.combine_ctas, 16 + 1);
  p.window_left = 100;
  p.window_right = 0;
  EXPECT_EQ(gpu::divide_work(p, c, 132).part_sums,
            16 * 2 * 4);  // a window crosses one edge at most
}

TEST(ForwardExplain, SaysWhichTileAndWhy) {
  const CallFacts facts(problem(72, 72));
  const std::vector<std::string> lines = explain_forward(facts, choose_forward_config(facts));
  EXPECT_NE(lines.at(0).find("head_dim 72 padded to 96"), std::string::npos) << lines.at(0);
  EXPECT_NE(lines.at(1).find(": "), std::string::npos);
}

TEST(ForwardPlan, OneQueryWhoseHeadsDifferStaysARow) {
  Problem p = problem(128, 128, 1);
  p.heads_q = 8;
  p.heads_kv = 2;
  p.q.head_stride = 128;
  Problem folded = p;
  fold_heads_into_rows(folded);
  EXPECT_EQ(folded.rows_q, 4);
  EXPECT_EQ(folded.heads_q, 2);
  EXPECT_EQ(folded.q.row_stride, 128);
  EXPECT_EQ(folded.q.head_stride, 512);
  const float sink[8] = {};
  std::vector<Problem> kept(5, p);
  kept[0].rows_q = 2;
  kept[1].sink = sink;       // one a head
  kept[2].window_left = 10;  // would move from row to row
  kept[3].packed_q = true;   // the next row is another sequence's
  kept[4].heads_kv = 8;      // nothing is shared
  for (const Problem& other : kept) {
    Problem same = other;
    fold_heads_into_rows(same);
    EXPECT_EQ(same.rows_q, other.rows_q);
  }
}

}  // namespace
}  // namespace tandem
