// From a Problem to what the kernel is launched with, without a driver.
#include "ops/forward/launch.hpp"

#include <gtest/gtest.h>

#include <climits>

#include "ops/forward/plan.hpp"
#include "ops/steps.hpp"

namespace tandem::gpu {
namespace {

alignas(256) std::uint16_t memory[4];

/// (batch 2, rows 100 of q and 300 of k, heads 8 over 2, head_dim 128 and 64 of v), contiguous.
Problem contiguous() {
  Problem p;
  p.batch = 2;
  p.heads_q = 8;
  p.heads_kv = 2;
  p.head_dim_qk = 128;
  p.head_dim_v = 64;
  p.rows_q = 100;
  p.rows_k = 300;
  const auto operand = [](std::int64_t rows, std::int64_t heads, std::int64_t dim) {
    return Operand{.data = memory,
                   .dtype = DType::bf16,
                   .batch_stride = rows * heads * dim,
                   .row_stride = heads * dim,
                   .head_stride = dim};
  };
  p.q = operand(100, 8, 128);
  p.k = operand(300, 2, 128);
  p.v = operand(300, 2, 64);
  p.out = operand(100, 8, 64);
  return p;
}

/// The workspace of a call on a GPU of 132 multiprocessors.
std::size_t workspace_bytes(const Problem& p, const ForwardConfig& c) {
  Steps steps;
  steps.problem = p;
  steps.multiprocessors = 132;
  add_forward(steps, c);
  return steps.workspace.bytes();
}

TensorMap count_bytes(const TensorMapSpec& spec) {
  TensorMap map{};
  map.opaque[0] = static_cast<unsigned long long>(spec.box[0] * spec.box[1]);
  return map;
}

ForwardParams params_of(const Problem& p, const Tiling& tiling, int sms = 132) {
  return make_forward_params(p, tiling, forward_maps(p, tiling), count_bytes, sms, nullptr);
}

TEST(ForwardTensorMap, DescribesRowsHeadsAndBatches) {
  const Problem p = contiguous();
  const ForwardConfig c = choose_forward_config(CallFacts(p));
  const TensorMapSpec q = forward_tensor_map(p, c.tiling, Loaded::q);
  EXPECT_EQ(q.dims, (std::array<std::int64_t, 5>{128, 100, 8, 2, 0}));
  EXPECT_EQ(q.strides, (std::array<std::int64_t, 4>{8 * 128 * 2, 128 * 2, 100 * 8 * 128 * 2, 0}));
  EXPECT_EQ(q.box, (std::array<int, 5>{64, 64, 1, 1, 0}));
  EXPECT_EQ(q.swizzle, Swizzle::b128);
  const TensorMapSpec k = forward_tensor_map(p, c.tiling, Loaded::k);
  EXPECT_EQ(k.box, (std::array<int, 5>{64, c.tiling.block_n, 1, 1, 0}));
  const TensorMapSpec v = forward_tensor_map(p, c.tiling, Loaded::v);
  EXPECT_EQ(v.dims, (std::array<std::int64_t, 5>{64, 300, 2, 2, 0}));
  for (const TensorMapSpec& spec : {q, k, v}) EXPECT_TRUE(tma_can_read(spec));
  EXPECT_EQ(workspace_bytes(p, c), 0U);
}

/// Boxes of heads by rows: in shared memory the heads of a query follow each other.
TEST(ForwardTensorMap, HeadsAsRowsAreInnerToRows) {
  Problem p = contiguous();
  p.rows_q = 5;
  Tiling tiling{.block_m = 64, .heads_as_rows = true};
  const TensorMapSpec q = forward_tensor_map(p, tiling, Loaded::q);
  EXPECT_EQ(q.dims, (std::array<std::int64_t, 5>{128, 8, 5, 2, 0}));
  EXPECT_EQ(q.strides, (std::array<std::int64_t, 4>{128 * 2, 8 * 128 * 2, 100 * 8 * 128 * 2, 0}));
  EXPECT_EQ(q.box, (std::array<int, 5>{64, 4, 16, 1, 0}));
  const ForwardParams params = params_of(p, tiling);
  EXPECT_EQ(params.heads_q, 2) << "a tile has the four query heads of a KV head";
  EXPECT_EQ(params.group, 4);
  EXPECT_EQ(params.row_heads, 4);
  EXPECT_EQ(params.row_queries, 16);
  EXPECT_EQ(params.m_blocks, 1);
}

/// Rows divide by a multiplication.
TEST(ForwardParameters, TheReciprocalDividesEveryRow) {
  for (int heads = 1; heads <= 64; ++heads) {
    for (int row = 0; row < 64; ++row) ASSERT_EQ(row * (65536 / heads + 1) >> 16, row / heads) << heads;
  }
}

TEST(ForwardTensorMap, TilesOfFewRowsFetchKeysByTheRowsOfTheirBoxes) {
  Problem p = contiguous();
  Tiling tiling = choose_forward_config(CallFacts(p)).tiling;
  EXPECT_TRUE(forward_tensor_map(p, tiling, Loaded::k).wide_fetch);
  for (const int rows : {decode_rows, 64}) {
    tiling.block_m = rows;
    EXPECT_FALSE(forward_tensor_map(p, tiling, Loaded::k).wide_fetch) << rows;
    EXPECT_FALSE(forward_tensor_map(p, tiling, Loaded::v).wide_fetch) << rows;
    EXPECT_TRUE(forward_tensor_map(p, tiling, Loaded::q).wide_fetch) << rows;
  }
}

TEST(ForwardTensorMap, HeadDimensionsBesideMultiplesOf64TakeNarrowStrips) {
  Problem p = contiguous();
  p.head_dim_qk = 96;
  const TensorMapSpec q = forward_tensor_map(p, choose_forward_config(CallFacts(p)).tiling, Loaded::q);
  EXPECT_EQ(q.box[0], 32);
  EXPECT_EQ(q.swizzle, Swizzle::b64);
}

TEST(ForwardTensorMap, StridesOfSingleElementsAreIgnored) {
  Problem p = contiguous();
  p.batch = 1;
  p.q.batch_stride = 3;
  EXPECT_TRUE(tma_can_read(forward_tensor_map(p, choose_forward_config(CallFacts(p)).tiling, Loaded::q)));
}

TEST(ForwardTensorMap, EmptyTensorsStillHaveAMap) {
  Problem p = contiguous();
  p.rows_k = 0;
  p.k.data = nullptr;
  EXPECT_TRUE(tma_can_read(forward_tensor_map(p, choose_forward_config(CallFacts(p)).tiling, Loaded::k)));
  // Whatever the addresses and strides: nothing is to be copied for TMA's sake.
  p.out.data = &memory[1];
  p.k.row_stride = p.v.head_stride = 7;
  EXPECT_TRUE(tma_can_read(forward_tensor_map(p, choose_forward_config(CallFacts(p)).tiling, Loaded::k)));
  EXPECT_TRUE(tma_can_read(forward_tensor_map(p, choose_forward_config(CallFacts(p)).tiling, Loaded::v)));
}

TEST(ForwardWorkspace, HoldsCopiesOfWhatTmaCannotRead) {
  Problem p = contiguous();
  const ForwardConfig c = choose_forward_config(CallFacts(p));
  p.k.row_stride += 1;
  EXPECT_EQ(workspace_bytes(p, c), 2U * 300 * 2 * 128 * 2);
  p.v.data = memory + 1;
  EXPECT_EQ(workspace_bytes(p, c), 2U * 300 * 2 * 128 * 2 + 2U * 300 * 2 * 64 * 2);
}

TEST(ForwardParameters, FollowTheProblem) {
  Problem p = contiguous();
  p.scale = 0.5F;
  p.window_left = 7;
  p.packed_k = true;
  const ForwardParams params = params_of(p, choose_forward_config(CallFacts(p)).tiling);
  EXPECT_EQ(params.q.opaque[0], 64U * 64);
  EXPECT_EQ(params.out, memory);
  EXPECT_EQ(params.out_stride.row, 8 * 64);
  EXPECT_EQ(params.m_blocks, 1);
  EXPECT_EQ(params.window_left, 7);
  EXPECT_EQ(params.window_right, INT_MAX);
  EXPECT_EQ(params.score.scale, 0.5F);
  EXPECT_FALSE(params.packed_q);
  EXPECT_TRUE(params.packed_k);
  EXPECT_TRUE(params.out_vectors);
}

TEST(ForwardParameters, OutputsThatAreNotAlignedAreStoredByElement) {
  const auto vectors = [](auto change) {
    Problem p = contiguous();
    change(p);
    return params_of(p, choose_forward_config(CallFacts(p)).tiling).out_vectors;
  };
  EXPECT_FALSE(vectors([](Problem& p) { p.out.data = memory + 1; }));
  EXPECT_FALSE(vectors([](Problem& p) { p.out.row_stride += 4; }));
  EXPECT_FALSE(vectors([](Problem& p) { p.head_dim_v = 60; }));
}

TEST(ForwardParameters, TheLastHeadsAreInterleaved) {
  Problem p = contiguous();
  p.batch = 4;
  p.heads_q = 64;
  p.heads_kv = 16;
  p.rows_q = 7 * 128;
  ForwardConfig c = choose_forward_config(CallFacts(p));
  c.tiling.block_m = 128;
  const auto in_order = [&](int sms) { return params_of(p, c.tiling, sms).heads_in_order; };
  EXPECT_EQ(in_order(132), 4 * 64 - 34) << "33 heads of 28 blocks are two of the longest on 132 SMs";
  EXPECT_EQ(in_order(4), 4 * 64 - 2);
  EXPECT_EQ(in_order(4096), 0) << "never less than none";
}

TEST(ForwardTiles, CountsBlocksOfQueries) {
  Problem p = contiguous();
  ForwardConfig c = choose_forward_config(CallFacts(p));
  c.tiling.block_m = 64;
  EXPECT_EQ(forward_tile_count(p, c.tiling), 2 * 8 * 2);
  p.packed_q = true;
  EXPECT_EQ(forward_tile_count(p, c.tiling), 8 * (2 + 3))
      << "two sequences and the rows before and past them may end in partial tiles";
  p.rows_q = 0;
  p.batch = 0;
  EXPECT_EQ(forward_tile_count(p, c.tiling), 0);
}

}  // namespace
}  // namespace tandem::gpu
