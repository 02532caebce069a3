// The tiles that benchmarks time, at the lengths at which the plan picks them, against fp64 on a sample of
// their rows. That the plan picks them is checked anywhere; the rest is skipped, with the reason, where there
// is no GPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "api/make_problem.hpp"
#include "gpu_cases.hpp"
#include "gpu_runner.hpp"
#include "harness/changes.hpp"
#include "harness/recipe_reference.hpp"
#include "harness/sample.hpp"
#include "ops/backward/plan.hpp"
#include "ops/eight_bit/plan.hpp"
#include "ops/forward/plan.hpp"
#include "problem/recipe_of.hpp"

namespace tandem::gpu {
namespace {

using harness::Box;
using harness::Call;
using harness::Case;

/// A line of a plan's table, and a call that takes it.
struct Tile {
  int head_dim;
  bool causal;
  std::int64_t rows;
  int block_m, block_n;
  bool pingpong;
  bool deterministic = false;
};

std::string name_of_tile(const Tile& t) {
  return fmt::format("d{}_{}{}_{}", t.head_dim, t.causal ? "causal" : "full",
                     t.deterministic ? "_deterministic" : "", t.rows);
}

Case case_of(const Tile& t, DType dtype) {
  Case c = with(small_case(dtype, t.rows, t.rows), {.heads_q = 2, .head_dim = t.head_dim});
  change(c, {.causal = t.causal, .deterministic = t.deterministic});
  return c;
}

using TileAndDType = std::tuple<Tile, DType>;
std::string name_of_both(const testing::TestParamInfo<TileAndDType>& at) {
  const auto& [tile, dtype] = at.param;
  return name_of_tile(tile) + "_" + name_of(dtype);
}

/// The rule on the first rows of two heads, the last, and some between.
void expect_right(const Call& call, Pass pass) {
  const Problem p =
      pass == Pass::forward ? make_problem(call.forward_args()) : make_problem(call.backward_args());
  for (const harness::SampleError& error :
       harness::compare_sample(p, call.spec.dtype, pass, harness::sample_parts(p, 1))) {
    EXPECT_TRUE(error.deviation.right())
        << error.output << ": " << error.deviation.complaint() << "; the worst is at " << error.worst;
  }
}

class TimedForwardTiles : public testing::TestWithParam<TileAndDType> {};

TEST_P(TimedForwardTiles, MatchFp64OnASampleOfRows) {
  const auto& [tile, dtype] = GetParam();
  Call call(case_of(tile, dtype));
  const ForwardConfig config = choose_forward_config(CallFacts(make_problem(call.forward_args())));
  ASSERT_EQ(config.tiling.block_m, tile.block_m);
  ASSERT_EQ(config.tiling.block_n, tile.block_n);
  ASSERT_EQ(config.schedule.pingpong, tile.pingpong);
  if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  call.prepare(Pass::forward);
  GpuRunner().forward(call);
  expect_right(call, Pass::forward);
}

INSTANTIATE_TEST_SUITE_P(
    Plan, TimedForwardTiles,
    testing::Combine(
        testing::Values(Tile{64, false, 6143, 128, 64, false}, Tile{64, false, 8200, 192, 128, true},
                        Tile{64, true, 511, 128, 64, false}, Tile{64, true, 1535, 128, 64, false},
                        Tile{64, true, 8200, 128, 64, false}, Tile{96, false, 1536, 192, 96, false},
                        Tile{96, true, 1536, 192, 96, false}, Tile{128, false, 1000, 128, 128, true},
                        Tile{128, false, 1536, 192, 64, false}, Tile{128, false, 16300, 192, 64, false},
                        Tile{128, true, 383, 128, 128, true}, Tile{128, true, 384, 192, 64, false},
                        Tile{128, true, 8200, 192, 64, false}, Tile{128, true, 16300, 192, 64, false},
                        Tile{256, false, 700, 128, 64, true}, Tile{256, false, 768, 128, 80, true},
                        Tile{256, false, 3072, 128, 80, false}, Tile{256, false, 8200, 128, 80, false},
                        Tile{256, true, 3000, 128, 64, false}, Tile{256, true, 8200, 128, 64, false}),
        testing::Values(DType::bf16, DType::f16)),
    name_of_both);

class TimedBackwardTiles : public testing::TestWithParam<TileAndDType> {};

TEST_P(TimedBackwardTiles, MatchFp64OnASampleOfRows) {
  const auto& [tile, dtype] = GetParam();
  Call call(case_of(tile, dtype));
  const BackwardConfig config = choose_backward_config(CallFacts(make_problem(call.backward_args())));
  ASSERT_EQ(config.tiling.block_m, tile.block_m);
  ASSERT_EQ(config.tiling.block_n, tile.block_n);
  ASSERT_EQ(config.schedule.pingpong, tile.pingpong);
  if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  GpuRunner runner;
  call.prepare(Pass::forward);
  runner.forward(call);
  expect_right(call, Pass::forward);
  call.prepare(Pass::backward);
  runner.backward(call);
  expect_right(call, Pass::backward);
}

INSTANTIATE_TEST_SUITE_P(
    Plan, TimedBackwardTiles,
    testing::Combine(
        testing::Values(Tile{64, false, 255, 128, 128, false}, Tile{64, false, 256, 128, 128, true},
                        Tile{64, false, 8200, 128, 128, true}, Tile{64, true, 383, 128, 128, false},
                        Tile{64, true, 384, 128, 128, true}, Tile{64, true, 8200, 128, 128, true},
                        Tile{64, true, 8200, 128, 128, true, true}, Tile{128, false, 1000, 64, 128, true},
                        Tile{128, false, 8200, 64, 128, true}, Tile{128, false, 8200, 64, 128, true, true},
                        Tile{128, true, 8200, 64, 128, true}, Tile{256, false, 4100, 64, 64, false},
                        Tile{256, true, 4100, 64, 64, false}, Tile{256, false, 8200, 64, 64, false, true}),
        testing::Values(DType::bf16, DType::f16)),
    name_of_both);

/// Cases of the 8-bit kernel, whose tile has 128 keys always.
struct EightBitTile {
  Precision precision;
  int head_dim;
  bool causal;
  std::int64_t rows;
  int block_m, slices;
  bool overlap, pingpong;
};

/// The last rows of a call, as a call whose results they are: Q's scales are of blocks of 128 rows, which
/// begin with the first of these.
Call last_rows_of(const Call& whole) {
  const std::int64_t first = (whole.spec.seqlen_q - 200) / 128 * 128;
  Case c = whole.spec;
  c.seqlen_q -= first;
  Call tail(c);
  const auto copy = [](Box& to, const Box& from, std::int64_t at) {
    for (std::int64_t n = 0; n < to.numel(); ++n) to.set(n, from.get(at + n));
  };
  copy(tail.k, whole.k, 0);
  copy(tail.v, whole.v, 0);
  copy(tail.q, whole.q, first * c.heads_q * c.head_dim_qk);
  copy(tail.out, whole.out, first * c.heads_q * c.head_dim_v);
  for (std::int64_t n = 0; n < tail.lse.numel(); ++n) {
    tail.lse.set(n, whole.lse.get(n / c.seqlen_q * whole.spec.seqlen_q + first + n % c.seqlen_q));
  }
  return tail;
}

class TimedEightBitTiles : public testing::TestWithParam<EightBitTile> {};

TEST_P(TimedEightBitTiles, FollowTheRecipeInTheLastRows) {
  const EightBitTile& tile = GetParam();
  Case c = with(small_case(DType::bf16, tile.rows, tile.rows), {.heads_q = 2, .head_dim = tile.head_dim});
  change(c, {.causal = tile.causal, .precision = tile.precision});
  Call call(c);
  const EightBitConfig config =
      choose_eight_bit_config(CallFacts(make_problem(call.forward_args())), recipe_of(tile.precision, false));
  ASSERT_EQ(config.tiling.block_m, tile.block_m);
  ASSERT_EQ(config.slices, tile.slices);
  ASSERT_EQ(config.schedule.overlap, tile.overlap);
  ASSERT_EQ(config.schedule.pingpong, tile.pingpong);
  if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  call.prepare(Pass::forward);
  GpuRunner().forward(call);
  const Call tail = last_rows_of(call);
  EXPECT_TRUE(follows_recipe(tail, expect_recipe(tail, harness::Accumulator::tensor_cores)));
}

constexpr Precision fp8 = Precision::fp8;
constexpr Precision int8 = Precision::int8;
INSTANTIATE_TEST_SUITE_P(Plan, TimedEightBitTiles,
                         testing::Values(EightBitTile{fp8, 64, false, 4100, 192, 1, false, true},
                                         EightBitTile{fp8, 64, true, 4100, 192, 2, true, false},
                                         EightBitTile{fp8, 64, true, 6144, 192, 2, true, true},
                                         EightBitTile{fp8, 128, false, 8200, 192, 2, false, false},
                                         EightBitTile{fp8, 128, true, 8200, 192, 2, false, false},
                                         EightBitTile{fp8, 256, false, 4100, 128, 4, false, false},
                                         EightBitTile{fp8, 256, true, 4100, 128, 4, false, false},
                                         EightBitTile{int8, 64, false, 4100, 192, 1, false, true},
                                         EightBitTile{int8, 64, true, 6144, 192, 2, true, false},
                                         EightBitTile{int8, 128, false, 8200, 128, 1, true, false},
                                         EightBitTile{int8, 128, true, 8200, 128, 1, true, false},
                                         EightBitTile{int8, 256, false, 4100, 128, 4, false, false},
                                         EightBitTile{int8, 256, true, 4100, 128, 4, false, true}),
                         [](const auto& at) {
                           std::string name =
                               fmt::format("{}_d{}_{}_{}", name_of(at.param.precision), at.param.head_dim,
                                           at.param.causal ? "causal" : "full", at.param.rows);
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace tandem::gpu
