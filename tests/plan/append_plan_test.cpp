// The plans of append_kv and merge: one launch or none, and what the kernels refuse.
#include "ops/cache/plan.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "config/fields.hpp"
#include "harness/error_of.hpp"
#include "ops/cache/launch.hpp"
#include "ops/plan_gpu.hpp"

namespace tandem {
namespace {

AppendProblem append_problem() {
  alignas(16) static std::array<std::byte, 64> memory;
  AppendProblem problem;
  problem.device = {.kind = Device::Kind::cuda, .index = 0};
  problem.batch = 8;
  problem.rows_new = 100;
  problem.heads_kv = 2;
  problem.head_dim_k = 64;
  problem.entries = 8;
  problem.entry_rows = 1000;
  problem.k_new = {.data = memory.data(),
                   .dtype = DType::bf16,
                   .batch_stride = 12800,
                   .row_stride = 128,
                   .head_stride = 64};
  problem.k_cache = problem.k_new;
  return problem;
}

/// Two parts of `rows` rows beside one another.
MergeProblem merge_problem(std::int64_t rows, std::size_t parts) {
  static std::array<float, 65536> memory;
  MergeProblem problem;
  problem.device = {.kind = Device::Kind::cuda, .index = 0};
  problem.batch = 1;
  problem.rows = rows;
  problem.heads = 1;
  problem.head_dim = 4;
  problem.out = {.data = memory.data(), .dtype = DType::bf16, .row_stride = 4};
  for (std::size_t i = 0; i < parts; ++i) {
    problem.parts.push_back({.out = {.data = memory.data() + 64 * i, .row_stride = 4},
                             .lse = {.data = memory.data() + 8 * i, .row_stride = 1}});
  }
  return problem;
}

TEST(AppendPlan, IsOneLaunch) {
  const AppendProblem problem = append_problem();
  const gpu::AppendSteps steps = append_steps(problem, choose_append_config(problem), 132);
  ASSERT_EQ(steps.list.size(), 1U);
  EXPECT_EQ(steps.list.begin()->kernel, &gpu::kernels::append);
  EXPECT_EQ(steps.list.begin()->grid, 4U * 132U);
}

TEST(AppendPlan, FindsScalesWhereTheyHaveAPlace) {
  AppendProblem problem = append_problem();
  problem.k_cache.dtype = DType::e4m3;
  EXPECT_FALSE(choose_append_config(problem).finds_scales);
  static std::array<float, 4> scales;
  problem.v_scale_cache = {.data = scales.data(), .batch_stride = 2000, .row_stride = 1, .head_stride = 1000};
  EXPECT_TRUE(choose_append_config(problem).finds_scales);
  const AppendParams params = gpu::make_append_params(problem, 4);
  EXPECT_EQ(params.k_found.data, nullptr);
  EXPECT_EQ(params.v_found.data, scales.data());
  EXPECT_EQ(params.v_found.stride.batch, 2000);
  EXPECT_EQ(params.v_found.stride.row, 1);
  EXPECT_EQ(params.v_found.stride.head, 1000);
}

TEST(AppendPlan, HasNoMoreBlocksThanTokens) {
  AppendProblem problem = append_problem();
  problem.rows_new = 1;
  EXPECT_EQ(append_steps(problem, choose_append_config(problem), 132).list.begin()->grid, 8U);
}

/// For a launch of `grid` blocks: rows in a run and in a stretch, and stretches that all sequences can touch.
std::array<int, 3> runs_of(const AppendProblem& problem, std::int64_t grid) {
  const AppendParams params = gpu::make_append_params(problem, grid);
  return {1 << params.run_shift, 1 << params.stretch_shift, params.words};
}
using Runs = std::array<int, 3>;

TEST(AppendPlan, RunsAreAsLongAsEveryBlockHasFour) {
  AppendProblem problem = append_problem();
  problem.batch = 2;
  problem.rows_new = 1000;
  EXPECT_EQ(runs_of(problem, 528), (Runs{1, 32, 2 * 33}));  // 1000 rows from row 31 of a stretch on touch 33
  EXPECT_EQ(runs_of(problem, 250), (Runs{2, 64, 2 * 17}));
  EXPECT_EQ(runs_of(problem, 1), (Runs{4, 128, 2 * 9}));
  problem.packed = true;
  EXPECT_EQ(runs_of(problem, 30), (Runs{4, 128, (1000 + 2 * 254) / 128}));
  problem.batch = 0;
  EXPECT_EQ(runs_of(problem, 30)[2], 0);
}

TEST(AppendPlan, AStretchLiesInOnePage) {
  AppendProblem problem = append_problem();
  problem.rows_new = 100'000;
  static std::array<std::int32_t, 1> table;
  problem.pages = {.table = table.data(), .per_sequence = 1, .page_size = 48};
  problem.entry_rows = 48;
  EXPECT_EQ(runs_of(problem, 528), (Runs{4, 16, 8 * (100'030 / 16)}));
  problem.entry_rows = problem.pages.page_size = 7;
  EXPECT_EQ(runs_of(problem, 528), (Runs{1, 1, 8 * 100'000}));
  problem.pages = {};
  EXPECT_EQ(runs_of(problem, 528)[1], 128);
}

/// Where two tokens may go to one row, every block looks at all of them.
TEST(AppendPlan, TeamsShareWhatLiesInEntriesOfTheirOwn) {
  AppendProblem problem = append_problem();
  problem.rows_new = 1 << 20;
  const auto teams = [&](std::int64_t grid) { return gpu::make_append_params(problem, grid).teams; };
  EXPECT_EQ(teams(528), 15);
  EXPECT_EQ(teams(100), 3);
  EXPECT_EQ(teams(95), 1);
  EXPECT_EQ(teams(31), 1);
  problem.rows_new = 1 << 13;  // 520 words: too few to share
  EXPECT_EQ(teams(528), 1);
  problem.rows_new = 1 << 20;
  static std::array<std::int32_t, 8> index;
  problem.cache_batch_idx = {.data = index.data()};
  EXPECT_EQ(teams(528), 1);
  problem.cache_batch_idx = {};
  problem.pages = {.table = index.data(), .per_sequence = 1, .page_size = 1000};
  EXPECT_EQ(teams(528), 1);
}

TEST(AppendPlan, SlotsAreRowsByThemselves) {
  AppendProblem problem = append_problem();
  static std::array<std::int64_t, 1> slots;
  problem.batch = 1;
  problem.rows_new = 100'000;
  problem.packed = true;
  problem.slot_mapping = {.data = slots.data(), .wide = true};
  const AppendParams params = gpu::make_append_params(problem, 528);
  EXPECT_EQ(params.run_shift, 0);
  EXPECT_EQ(params.words, 100'000 / 32);
}

TEST(AppendPlan, LaunchesNothingForNothing) {
  AppendProblem problem = append_problem();
  problem.rows_new = 0;
  EXPECT_TRUE(append_steps(problem, choose_append_config(problem), 132).list.empty());
  problem = append_problem();
  problem.heads_kv = 0;
  EXPECT_TRUE(append_steps(problem, choose_append_config(problem), 132).list.empty());
  const MergeProblem none = merge_problem(0, 2);
  EXPECT_TRUE(merge_steps(none, choose_merge_config(none), 132).list.empty());
}

TEST(AppendPlan, RefusesMoreTokensThanItCounts) {
  AppendProblem problem = append_problem();
  problem.rows_new = std::int64_t{1} << 30;
  EXPECT_EQ(error_of(Status::unsupported, [&] { plan_append(problem); }),
            "an extent of 8589934592 is above the GPU kernels' 1073741823; split the append");
}

TEST(MergePlan, IsOneLaunchOfAWarpARow) {
  const MergeProblem problem = merge_problem(20, 2);
  const gpu::MergeSteps steps = merge_steps(problem, choose_merge_config(problem), 132);
  ASSERT_EQ(steps.list.size(), 1U);
  EXPECT_EQ(steps.list.begin()->grid, 3U);
  EXPECT_EQ(choose_merge_config(problem), (MergeConfig{.from = Stored::f32, .to = Stored::bf16}));
}

TEST(MergePlan, RefusesPartsOfOtherStridesAndTooManyPlaces) {
  MergeProblem problem = merge_problem(2, 3);
  problem.parts[2].lse.row_stride = 2;
  EXPECT_EQ(
      error_of(Status::unsupported, [&] { plan_merge(problem); }),
      "outs[2] or its lse has other strides than outs[0]; on a GPU all parts have one layout: make them "
      "contiguous");
  problem = merge_problem(2, 65);
  problem.parts[7].out.data = static_cast<float*>(problem.parts[7].out.data) + 4;
  EXPECT_EQ(error_of(Status::unsupported, [&] { plan_merge(problem); }),
            "outs has 65 parts in places of their own, above the GPU kernel's 64; stack them in one tensor");
}

TEST(AppendPlan, ShipsEachConfigOnce) {
  const std::vector<AppendConfig> configs = shipped_append_configs();
  for (std::size_t i = 0; i < configs.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j)
      EXPECT_NE(gpu::expression_of(configs[i]), gpu::expression_of(configs[j]));
  }
}

}  // namespace
}  // namespace tandem
