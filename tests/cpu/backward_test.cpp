// The CPU backward pass by itself: out and lse come from the oracle, so that nothing here depends on the
// forward kernels.
#include "api/make_problem.hpp"
#include "cpu/cpu.hpp"
#include "cpu/targets/kernels.hpp"
#include "harness/changes.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "harness/element.hpp"
#include "harness/expect.hpp"

namespace tandem {
namespace {

using harness::Box;
using harness::Call;
using harness::Case;
using harness::Random;

/// Fills out and lse with the oracle's, rounded to their dtypes.
void fill_forward(Call& call) {
  const reference::Forward exact = reference::forward(call.problem());
  for (std::int64_t n = 0; n < call.out.numel(); ++n) call.out.set(n, exact.out[static_cast<std::size_t>(n)]);
  for (std::int64_t n = 0; n < call.lse.numel(); ++n) call.lse.set(n, exact.lse[static_cast<std::size_t>(n)]);
}

Problem problem_of(const Call& call) {
  return make_problem(call.backward_args());
}

cpu::Config config_of(cpu::Target target, int threads) {
  return {.target = target,
          .threads = threads,
          .block_q = cpu::backward_block_q,
          .block_k = cpu::backward_block_k};
}

/// The smallest tiles that every target accepts: many blocks, and so many edges, in a small problem.
cpu::Config small_tiles(cpu::Config config) {
  config.block_q = 32;
  config.block_k = std::max(12, static_cast<int>(cpu::kernels(config.target).backward.strip));
  return config;
}

/// Runs the kernel on poisoned outputs and in a poisoned workspace of the size it asked for, between guards.
void run(Call& call, const cpu::Config& config) {
  const Problem problem = problem_of(call);
  const cpu::Plan plan(problem, config);
  const auto bytes = static_cast<std::int64_t>(plan.workspace_bytes);
  Box workspace(DType::f32, {bytes / 4}, {}, true);
  call.prepare(Pass::backward);
  workspace.snapshot();
  cpu::run(plan, {static_cast<std::byte*>(workspace.view().data), static_cast<std::size_t>(bytes)});
  EXPECT_EQ(workspace.changed_outside(), "") << "the workspace is larger than the plan says";
}

/// Against the oracle on every target, with the tiles it would choose and with small ones.
void check(Call& call) {
  fill_forward(call);
  const harness::Expected expected = harness::expect(call, Pass::backward);
  for (const cpu::Target target : cpu::available_targets()) {
    const cpu::Config config = config_of(target, call.spec.threads);
    for (const cpu::Config& c : {config, small_tiles(config)}) {
      SCOPED_TRACE(std::string(cpu::name_of(target)) + " block_q " + std::to_string(c.block_q) + ": " +
                   call.spec.describe());
      run(call, c);
      EXPECT_TRUE(harness::correct(call, Pass::backward, expected));
    }
  }
}

void check(const Case& spec) {
  Call call(spec);
  check(call);
}

class RandomProblems : public testing::TestWithParam<int> {};

TEST_P(RandomProblems, MatchTheOracle) {
  constexpr int problems = 12;
  for (int n = 0; n < problems; ++n) {
    Case spec = harness::random_case(static_cast<std::uint64_t>(GetParam() * problems + n), 150);
    if (spec.dtype == DType::e4m3) continue;  // has no backward
    spec.threads = 1 + n % 3;
    // Logits far above 10 turn the rounding of lse to fp32 into errors of P that 1e-5 has no room for.
    spec.amplitude = 1.0;
    if (spec.dtype == DType::f32 && spec.options.scale == 1.0F) spec.options.scale = 0.25F;
    check(spec);
    if (HasFailure()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(CpuBackward, RandomProblems, testing::Range(0, 12));

TEST(CpuBackward, HeadDimensionsThatFillNoPanel) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const auto& [d, dv] : {std::pair{1, 3}, {7, 65}, {33, 17}, {192, 128}}) {
      check({.dtype = dtype, .head_dim_qk = d, .head_dim_v = dv, .seqlen_q = 37, .seqlen_k = 45});
    }
  }
}

TEST(CpuBackward, LongerThanItsTiles) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const bool causal : {false, true}) {
      check({.dtype = dtype,
             .heads_q = 2,
             .seqlen_q = 601,
             .seqlen_k = 577,
             .options = {.causal = causal},
             .threads = 2});
    }
  }
}

TEST(CpuBackward, QueriesThatSeeNoKeyContributeNothing) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Call call({.dtype = dtype,
               .seqlen_q = 70,
               .seqlen_k = 40,
               .options = {.causal = true},
               .sink = true,
               .dlse = true});
    for (std::int64_t i = 0; i < 30 * 64; ++i) {  // queries 0 to 29 stand before key 0
      call.dout.set(i, std::numeric_limits<double>::quiet_NaN());
      call.q.set(i, std::numeric_limits<double>::infinity());
    }
    for (std::int64_t i = 0; i < 30; ++i) call.dlse.set(i, std::numeric_limits<double>::quiet_NaN());
    check(call);
  }
}

TEST(CpuBackward, ANanReachesExactlyWhatSeesIt) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const double value : {nan, std::numeric_limits<double>::infinity()}) {
      const Case spec{.dtype = dtype,
                      .head_dim_qk = 16,
                      .head_dim_v = 24,
                      .seqlen_q = 90,
                      .seqlen_k = 90,
                      .options = {.window_left = 9, .window_right = 4}};
      const auto spoil = [&](Box Call::*tensor, std::int64_t row, std::int64_t dim) {
        Call call(spec);
        (call.*tensor).set(row * dim + 3, value);
        check(call);
      };
      spoil(&Call::k, 50, 16);
      spoil(&Call::q, 50, 16);
      spoil(&Call::v, 50, 24);
      spoil(&Call::dout, 50, 24);
    }
  }
}

/// On every instruction set.
void expect_equal_bits(Call& call, std::initializer_list<int> numbers_of_threads) {
  for (const cpu::Target target : cpu::available_targets()) {
    std::vector<std::vector<std::byte>> first;
    for (const int threads : numbers_of_threads) {
      run(call, small_tiles(config_of(target, threads)));
      std::vector<std::vector<std::byte>> bits;
      for (const Box* box : call.outputs(Pass::backward)) {
        if (box->given()) bits.push_back(box->raw());
      }
      if (first.empty()) first = bits;
      EXPECT_TRUE(bits == first) << cpu::name_of(target) << " with " << threads << " threads";
    }
  }
}

TEST(CpuBackward, EqualBitsForAnyNumberOfThreads) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Case spec{.dtype = dtype,
              .batch = 3,
              .heads_q = 4,
              .heads_kv = 2,
              .seqlen_q = 200,
              .seqlen_k = 170,
              .used_q = {200, 33, 150},
              .used_k = {170, 101, 5},
              .options = {.causal = true},
              .sink = true};
    Call call(spec);
    fill_forward(call);
    expect_equal_bits(call, {1, 2, 3, 5, 16, 2});
  }
}

/// One long sequence among many short ones, whose sums lie where their keys do once units are many.
Case uneven_case(DType dtype) {
  Case c{.dtype = dtype,
         .batch = 14,
         .heads_q = 4,
         .heads_kv = 2,
         .head_dim_qk = 40,
         .head_dim_v = 24,
         .packed_q = true,
         .packed_k = true,
         .lengths_q = {7, 0, 40, 33, 1, 90, 64, 5, 12, 13, 31, 2, 70, 3},
         .lengths_k = {5, 9, 0, 300, 1, 13, 12, 24, 7, 37, 2, 11, 1, 25},
         .slack_k = 3};
  c.options.causal = true;
  return c;
}

TEST(CpuBackward, PackedSequencesGiveEqualBitsForAnyNumberOfThreads) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const unsigned unwanted : {0U, 2U, 4U}) {
      Call call(with(uneven_case(dtype), {.unwanted = unwanted, .threads = 16}));
      check(call);
      expect_equal_bits(call, {1, 2, 4, 16, 64, 5});
    }
  }
}

TEST(CpuBackward, SequencesThatOverlapStayInTheirMemory) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Case c = with(uneven_case(dtype), {.slack_k = 0});
    c.dk.ends_at_guard = c.dv.ends_at_guard = true;
    Call call(c);
    fill_forward(call);
    Random random(1);
    for (int n = 0; n < 6; ++n) {
      for (std::int64_t b = 0; b <= c.batch; ++b) {  // any order, and now and then outside
        call.cu_seqlens_k.set(b, static_cast<double>(random.between(-100, 600)));
        if (b % 2 == 1) call.cu_seqlens_k.set(b, static_cast<double>(random.between(400, 600)));
      }
      for (const cpu::Target target : cpu::available_targets()) {
        run(call, small_tiles(config_of(target, 8)));
        for (const Box* box : call.outputs(Pass::backward)) {
          EXPECT_TRUE(!box->given() || box->changed_outside().empty());
        }
      }
    }
  }
}

TEST(CpuBackward, GradientsThatNobodyWantsLeaveTheOthersBitsAlone) {
  for (const bool pairwise : {false, true}) {  // a masked tile with a NaN in a key
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Case c{.dtype = dtype,
             .heads_q = 4,
             .heads_kv = 2,
             .seqlen_q = 130,
             .seqlen_k = 130,
             .options = {.causal = true},
             .sink = true};
      Call whole(c);
      if (pairwise) whole.k.set(129 * 2 * 64, std::numeric_limits<double>::quiet_NaN());
      fill_forward(whole);
      run(whole, config_of(cpu::best_target(), 2));
      for (c.unwanted = 1; c.unwanted < 8; ++c.unwanted) {
        SCOPED_TRACE(c.describe());
        Call call(c);
        if (pairwise) call.k.set(129 * 2 * 64, std::numeric_limits<double>::quiet_NaN());
        fill_forward(call);
        run(call, config_of(cpu::best_target(), 2));
        for (Box Call::*tensor : {&Call::dq, &Call::dk, &Call::dv, &Call::dsink}) {
          if (!(call.*tensor).given()) continue;
          EXPECT_TRUE((call.*tensor).raw() == (whole.*tensor).raw());
        }
      }
    }
  }
}

TEST(CpuBackward, WorkspaceIsLinearInKeys) {
  const auto bytes = [](DType dtype, std::int64_t seqlen) {
    Call call({.dtype = dtype, .seqlen_q = seqlen, .seqlen_k = seqlen});
    const Problem problem = problem_of(call);
    return cpu::Plan(problem, config_of(cpu::best_target(), 2)).workspace_bytes;
  };
  constexpr std::size_t counters = 4096;
  EXPECT_LE(bytes(DType::f32, 4096), bytes(DType::f32, 512) + counters);
  const std::size_t sums = sizeof(float) * (4096 - 512) * (64 + 64);
  EXPECT_NEAR(static_cast<double>(bytes(DType::bf16, 4096) - bytes(DType::bf16, 512)),
              static_cast<double>(sums), static_cast<double>(sums) * 0.05);
}

}  // namespace
}  // namespace tandem
