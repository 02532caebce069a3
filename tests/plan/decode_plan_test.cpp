// Few queries of grouped heads: which tile they take, and which of its rows is what.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "ops/decode/plan.hpp"
#include "ops/forward/launch.hpp"
#include "ops/forward/plan.hpp"
#include "problem/effective.hpp"

namespace tandem {
namespace {

/// Never read.
alignas(256) std::byte keys[16];
alignas(256) std::byte values[16];

/// A problem of grouped heads and few queries a sequence.
Problem grouped(std::int64_t group, std::int64_t queries) {
  Problem p;
  p.k.data = keys;
  p.v.data = values;
  p.head_dim_qk = p.head_dim_v = 128;
  p.rows_q = queries;
  p.rows_k = 4096;
  p.q.dtype = p.out.dtype = DType::bf16;
  p.heads_kv = 8;
  p.heads_q = 8 * group;
  p.batch = 2;
  return p;
}

TEST(HeadRows, AreThoseOfTheFewestTiles) {
  const auto rows = [](std::int64_t group, std::int64_t queries) {
    const HeadRows r = best_head_rows(grouped(group, queries));
    return std::array<std::int64_t, 2>{r.heads, r.queries};
  };
  using Rows = std::array<std::int64_t, 2>;
  EXPECT_EQ(rows(4, 4), (Rows{4, 16}));
  EXPECT_EQ(rows(4, 64), (Rows{1, 64})) << "four tiles either way";
  EXPECT_EQ(rows(4, 63), (Rows{1, 64}));
  EXPECT_EQ(rows(4, 48), (Rows{4, 16})) << "three tiles, not four";
  EXPECT_EQ(rows(7, 9), (Rows{7, 9})) << "one row is left";
  EXPECT_EQ(rows(71, 1), (Rows{36, 1})) << "two tiles, of 36 and 35 heads";
  EXPECT_EQ(rows(48, 4), (Rows{16, 4})) << "three tiles of all queries, not four of one query";
  EXPECT_EQ(rows(1, 4), (Rows{1, 64}));
  Problem none = grouped(4, 4);
  none.heads_q = none.heads_kv = 0;
  EXPECT_EQ(best_head_rows(none).heads, 1);
}

TEST(HeadRows, FillTilesOfSixteenRowsToo) {
  EXPECT_EQ(best_head_rows(grouped(4, 4), 16).heads, 4);
  EXPECT_EQ(best_head_rows(grouped(5, 3), 16).queries, 3) << "one row is left";
  EXPECT_EQ(best_head_rows(grouped(1, 7), 16).queries, 16);
}

/// The kernel `decode` has 16 rows; more of them take the tile of 64.
TEST(ForwardPlan, SixteenRowsOfAKvHeadAreDecoded) {
  for (const auto& [group, queries] :
       {std::pair<std::int64_t, std::int64_t>{1, 1}, {1, 16}, {4, 4}, {16, 1}}) {
    const CallFacts facts(grouped(group, queries));
    EXPECT_TRUE(facts.decodes) << group << " x " << queries;
    const DecodeConfig c = choose_decode_config(facts);
    EXPECT_EQ(c.tiling.heads_as_rows, group > 1 && queries > 1) << "heads of a single query are its rows";
    EXPECT_EQ(forward_objection(c), "");
    EXPECT_EQ(ctas_per_sm(c), 2);
  }
  EXPECT_FALSE(CallFacts(grouped(4, 5)).decodes);
  EXPECT_FALSE(CallFacts(grouped(1, 17)).decodes);
  Problem fixed = grouped(4, 1);
  fixed.split_size = 1024;
  EXPECT_FALSE(CallFacts(fixed).decodes) << "prefills have the forward kernel's products";
}

/// Keys of 8 bits too, in half of the bytes, so that an SM has as many CTAs and more blocks in flight.
TEST(ForwardPlan, EightBitKeysAreDecoded) {
  for (const DType dtype : {DType::e4m3, DType::s8}) {
    for (const std::int64_t head_dim : {40, 128, 192, 256}) {
      Problem p = grouped(4, 1);
      p.head_dim_qk = p.head_dim_v = head_dim;
      const DecodeConfig wide = choose_decode_config(CallFacts(p));
      p.k.dtype = p.v.dtype = dtype;
      const DecodeConfig c = choose_decode_config(CallFacts(p));
      EXPECT_TRUE(CallFacts(p).decodes && c.has_byte_keys());
      EXPECT_EQ(c.tiling.head_dim_v % 64, 0);
      EXPECT_EQ(forward_objection(c), "");
      EXPECT_EQ(ctas_per_sm(c), head_dim > 160 ? 1 : 2) << "registers hold an O of 160 columns twice";
      EXPECT_GE(c.stages, wide.stages);
    }
  }
  Problem more = grouped(4, 5);
  more.k.dtype = more.v.dtype = DType::e4m3;
  EXPECT_TRUE(choose_forward_config(CallFacts(more)).has_byte_keys())
      << "64 rows are converted in shared memory";
}

/// No workspace, and no kernel behind it. Two CTAs an SM, of 132.
TEST(ForwardPlan, AClusterOfCtasLeavesNothingToMerge) {
  Problem p = grouped(4, 1);
  fold_heads_into_rows(p);
  DecodeConfig c = choose_decode_config(CallFacts(p));
  c.schedule = {.cluster = 16};
  c.stages = 2;
  EXPECT_EQ(forward_objection(c), "");
  EXPECT_EQ(ctas_per_sm(c), 2);
  for (const std::int64_t batch : {1, 2, 3}) {
    p.batch = batch;
    const gpu::WorkDivision work = gpu::divide_work(p, c, 132);
    EXPECT_EQ(work.ctas, 16 * std::min<std::int64_t>(8 * batch, 264 / 16));
    EXPECT_EQ(work.part_outputs + work.part_sums + work.combine_ctas, 0);
    EXPECT_EQ(work.part_rows, 4) << "the heads that share keys";
  }
  c.schedule = {.cluster = 3};
  EXPECT_EQ(forward_objection(c), "cluster 3 is not 1, 2, 4, 8 or 16");
  c.schedule.cluster = 16;
  c.tiling.head_dim_v = 96;
  EXPECT_EQ(forward_objection(c), "cluster 16 takes head dimensions of v that are multiples of 64, not 96");
}

TEST(HeadRows, OfPackedQueriesFollowTheirMean) {
  Problem p = grouped(4, 10);
  p.packed_q = true;
  p.batch = 3;
  EXPECT_EQ(queries_of(p), 4);
  EXPECT_EQ(best_head_rows(p).heads, 4);
  p.rows_q = 1000;
  EXPECT_FALSE(choose_forward_config(CallFacts(p)).tiling.heads_as_rows) << "334 queries each";
}

/// Sequences of length 0 are in the mean that decides whether a batch has tiles of few queries, and must not
/// change a bit of the others.
TEST(ForwardPlan, FewPackedQueriesHaveTheKeysOfManyInABlock) {
  const std::int32_t lengths[2] = {};
  for (const std::int64_t head_dim : {32, 64, 96, 128, 160, 192, 256}) {
    for (const bool causal : {false, true}) {
      const auto config = [&](std::int64_t rows) {
        Problem p = grouped(2, rows);
        p.head_dim_qk = p.head_dim_v = head_dim;
        p.rows_k = rows;
        p.batch = 7;
        p.packed_q = p.packed_k = true;
        p.cu_seqlens_q.data = p.cu_seqlens_k.data = lengths;
        if (causal) p.window_right = 0;
        return choose_forward_config(CallFacts(p));
      };
      const ForwardConfig few = config(7 * 16);
      const ForwardConfig many = config(7 * 100);
      EXPECT_TRUE(few.tiling.heads_as_rows && !many.tiling.heads_as_rows) << head_dim;
      EXPECT_EQ(few.tiling.block_n, many.tiling.block_n) << head_dim << (causal ? " causal" : " full");
      EXPECT_EQ(forward_objection(few), "");
    }
  }
}

TEST(ForwardPlan, FewQueriesOfGroupedHeadsAreRowsOfOneTile) {
  const std::int32_t lengths[2] = {};
  const auto expect_rows = [&](std::int64_t queries, auto choose) {
    Problem p = grouped(4, queries);
    p.window_right = 0;
    p.seqused_k.data = lengths;
    const auto c = choose(CallFacts(p));
    EXPECT_TRUE(c.tiling.heads_as_rows && c.mask.causal);
    EXPECT_TRUE(c.schedule.split || c.cluster() > 1);
    EXPECT_EQ(gpu::forward_tile_count(p, c.tiling), 2 * 8);
    p.window_right = -1;
    EXPECT_EQ(choose(CallFacts(p)), c) << "one kernel serves both masks";
    p.batch = 600;
    EXPECT_FALSE(choose(CallFacts(p)).schedule.split) << "4800 tiles keep all multiprocessors busy";
    EXPECT_TRUE(choose(CallFacts(p)).tiling.heads_as_rows);
    p.split_size = 1024;
    EXPECT_TRUE(choose_forward_config(CallFacts(p)).tiling.heads_as_rows);
  };
  for (const std::int64_t queries : {2, 4}) expect_rows(queries, choose_decode_config);
  expect_rows(16, choose_forward_config);
  EXPECT_FALSE(choose_decode_config(CallFacts(grouped(1, 4))).tiling.heads_as_rows);
  EXPECT_FALSE(choose_forward_config(CallFacts(grouped(4, 100))).tiling.heads_as_rows);
}

/// Tiles that are many keep the multiprocessors of the GPU busy, which are not 132 on every one.
TEST(ForwardPlan, KeysAreSharedWhereTheGpuHasMoreMultiprocessors) {
  for (const gpu::DeviceProperties& device : gpu::described_devices())
    EXPECT_EQ(facts_of(device).multiprocessors, device.multiprocessors) << device.name;
  const std::int32_t lengths[2] = {};
  Problem p = grouped(4, 1);
  p.batch = 60;  // 480 tiles: fewer than four for each of 132 multiprocessors, but not of 114
  p.seqused_k.data = lengths;
  EXPECT_TRUE(CallFacts(p).shares_keys);
  EXPECT_TRUE(choose_decode_config(CallFacts(p)).schedule.split);
  const CallFacts pcie(p, {.multiprocessors = 114});
  EXPECT_FALSE(pcie.shares_keys);
  EXPECT_FALSE(choose_decode_config(pcie).schedule.split);
  p.split_size = 1024;
  EXPECT_TRUE(CallFacts(p).shares_keys);
  EXPECT_FALSE(CallFacts(p, {.multiprocessors = 114}).shares_keys);
}

TEST(ForwardPlan, StepsOfGroupedHeadsAreShipped) {
  const std::vector<DecodeConfig> configs = shipped_decode_configs();
  const std::int32_t lengths[2] = {};
  for (const std::int64_t batch : {2, 600}) {
    for (const bool pages : {false, true}) {
      for (const DType dtype : {DType::bf16, DType::e4m3}) {
        Problem p = grouped(4, 4);
        p.batch = batch;
        p.window_right = 0;
        p.seqused_k.data = lengths;
        p.k.dtype = p.v.dtype = dtype;
        p.cache_batch = pages ? 9 : 0;
        if (pages) p.pages = {.table = lengths, .count = 9, .page_size = 16};
        const DecodeConfig c = choose_decode_config(CallFacts(p));
        EXPECT_TRUE(c.tiling.heads_as_rows);
        EXPECT_EQ(c.key_type, dtype == DType::e4m3 ? OperandType::e4m3 : OperandType::input);
        EXPECT_NE(std::find(configs.begin(), configs.end(), c), configs.end());
      }
    }
  }
}

TEST(ForwardExplain, SaysWhichHeadsAreRows) {
  const CallFacts facts(grouped(4, 4));
  const std::vector<std::string> lines = explain_forward(facts, choose_decode_config(facts));
  EXPECT_NE(lines.at(1).find("tile 4 queries of 4 heads that share keys x 64 keys"), std::string::npos)
      << lines.at(1);
}

TEST(ForwardPlan, PartsOfGroupedHeadsHaveAPlaceForEachRow) {
  Problem p = grouped(4, 4);
  p.split_size = 1024;
  const ForwardConfig c = choose_forward_config(CallFacts(p));
  ASSERT_TRUE(c.schedule.split);
  const gpu::WorkDivision work = gpu::divide_work(p, c, 132);
  EXPECT_EQ(work.part_rows, 16);
  EXPECT_EQ(work.part_sums, 2 * 8 * 4 * 16);  // sequences, KV heads, splits, rows
  EXPECT_EQ(work.combine_ctas, 2 * 8 * (16 / combine_rows) + 1);
}

/// docs/kernels/decode.md has the times that these follow.
TEST(ForwardPlan, ClustersShareTheKeysOfATile) {
  const std::int32_t lengths[128] = {};
  const auto ctas = [&](std::int64_t batch, std::int64_t count, bool on_device, int page_size = 0) {
    Problem p = grouped(4, 1);
    p.batch = batch;
    p.rows_k = count;
    p.k.dtype = DType::bf16;
    if (page_size > 0) p.pages = {.table = lengths, .count = 9, .page_size = page_size};
    if (on_device) p.seqused_k.data = lengths;
    const DecodeConfig c = choose_decode_config(CallFacts(p));
    EXPECT_EQ(forward_objection(c), "");
    return c.schedule.split ? -c.cluster() : c.cluster();
  };
  for (const bool on_device : {false, true}) {
    EXPECT_EQ(ctas(1, 128, on_device), 1) << "two blocks";
    EXPECT_EQ(ctas(1, 256, on_device), 4) << "a block each";
    EXPECT_EQ(ctas(1, 8192, on_device), 8);
    EXPECT_EQ(ctas(1, 32768, on_device), -1) << "64 CTAs do not read at the memory's rate";
    EXPECT_EQ(ctas(4, 2048, on_device), 4);
  }
  EXPECT_EQ(ctas(8, 8192, false), 2);
  EXPECT_EQ(ctas(64, 8192, false), 2);
  EXPECT_EQ(ctas(128, 8192, false), 1) << "many tiles";
  EXPECT_EQ(ctas(8, 8192, true), -2) << "one sequence may have all keys, and 16 CTAs";
  EXPECT_EQ(ctas(4, 8192, true), -1);
  EXPECT_EQ(ctas(1, 8192, true, 16), -1) << "64 CTAs start copies of 16 rows more slowly";
  EXPECT_EQ(ctas(1, 1024, true, 16), 8);
}
}  // namespace
}  // namespace tandem
