// The kernels of append_kv and merge in the emulator: the contract's tests with them as the backend, and what
// the CPU has no counterpart of. The main is here, since it chooses the runner.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "api/make_merge_problem.hpp"
#include "cache/emulated_cache.hpp"
#include "launch.hpp"
#include "ops/cache/common/stored_rows.cuh"
#include "ops/cache/launch.hpp"
#include "ops/cache/plan.hpp"

namespace tandem::kernel_tests {
namespace {

/// More parts than the kernel's parameters have room for, at even distances in one tensor.
TEST(MergeKernel, TakesAnyNumberOfPartsInOneTensor) {
  constexpr std::int64_t parts = 100;
  constexpr std::int64_t rows = 3;
  constexpr std::int64_t heads = 2;
  constexpr std::int64_t dim = 12;
  std::vector<float> outs(parts * rows * heads * dim);
  std::vector<float> lses(parts * heads * rows);
  harness::Random random(9);
  for (float& x : outs) x = static_cast<float>(random.normal());
  for (float& x : lses) x = static_cast<float>(2.0 * random.normal());
  std::vector<float> out(rows * heads * dim);
  std::vector<float> lse(heads * rows);
  std::vector<float> expected(out.size());
  std::vector<float> expected_lse(lse.size());
  std::vector<ConstTensor> out_views;
  std::vector<ConstTensor> lse_views;
  for (std::int64_t i = 0; i < parts; ++i) {
    out_views.emplace_back(outs.data() + i * rows * heads * dim, DType::f32,
                           std::initializer_list<std::int64_t>{rows, heads, dim});
    lse_views.emplace_back(lses.data() + i * heads * rows, DType::f32,
                           std::initializer_list<std::int64_t>{heads, rows});
  }
  merge({.outs = out_views,
         .lses = lse_views,
         .out = Tensor(expected.data(), DType::f32, {rows, heads, dim}),
         .lse = Tensor(expected_lse.data(), DType::f32, {heads, rows})});
  const MergeProblem problem = make_merge_problem({.outs = out_views,
                                                   .lses = lse_views,
                                                   .out = Tensor(out.data(), DType::f32, {rows, heads, dim}),
                                                   .lse = Tensor(lse.data(), DType::f32, {heads, rows})});
  ASSERT_TRUE(gpu::parts_are_even(problem));
  emulator::Options options{.buffers = {emulator::readable(outs), emulator::readable(lses),
                                        emulator::writable(out), emulator::writable(lse)}};
  emulate_merge(problem, options);
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], expected[i], 1e-6);
  for (std::size_t i = 0; i < lse.size(); ++i) EXPECT_NEAR(lse[i], expected_lse[i], 1e-6 * std::abs(lse[i]));
}

/// Elements of a row go to their places, four or eight at a time, as vectors or one by one.
template <Stored type, bool vectors, int count, typename T>
void expect_elements_at_their_places(T three) {
  constexpr int columns = 16;
  std::vector<T> row(columns, T{});
  emulator::Options options{.buffers = {emulator::writable(row)}};
  emulator::launch(
      [&] {
        float x[count];
        for (int i = 0; i < count; ++i) x[i] = i == count - 1 ? 3.0F : 0.0F;
        if (ptx::thread_index() == 0) stored::store<type, vectors, count>(x, row.data(), 8, columns);
      },
      {.blocks = 1, .threads = 32}, options);
  for (int col = 0; col < columns; ++col)
    EXPECT_EQ(row[static_cast<std::size_t>(col)], col == 7 + count ? three : T{}) << col;
}
TEST(StoredRows, ElementsGoToTheirPlaces) {
  expect_elements_at_their_places<Stored::f32, true, 4>(3.0F);
  expect_elements_at_their_places<Stored::f32, true, 8>(3.0F);
  expect_elements_at_their_places<Stored::f32, false, 8>(3.0F);
  expect_elements_at_their_places<Stored::bf16, true, 8>(std::uint16_t{0x4040});
  expect_elements_at_their_places<Stored::bf16, false, 8>(std::uint16_t{0x4040});
  expect_elements_at_their_places<Stored::f16, true, 4>(std::uint16_t{0x4200});
}

/// Every 16-bit significand of an element, and every `step`-th of a scale, in all the usual exponents.
template <bool of_16_bits>
int wrong_quotients(std::uint32_t step) {
  harness::Random random(3);
  int wrong = 0;
  for (std::uint32_t m = 0; m < 1U << 23; m += step) {
    const int exponent = static_cast<int>(m / step % 150) - 75;
    const float scale = std::ldexp(ptx::float_of(0x3f800000U | m), exponent);
    for (std::uint32_t k = 0; k < 2048; k += 8) {
      float x[8];
      float q[8];
      for (std::uint32_t i = 0; i < 8; ++i) {
        const auto low = static_cast<std::uint32_t>(of_16_bits ? 0 : random.between(0, 4095));
        const float significand = ptx::float_of(0x3f800000U | (k + i) << 12 | low);
        q[i] = x[i] = std::ldexp(i % 2 != 0 ? -significand : significand, exponent);
      }
      stored::divide_by<of_16_bits>(q, scale);
      for (int i = 0; i < 8; ++i) wrong += q[i] != x[i] / scale ? 1 : 0;
    }
  }
  return wrong;
}
TEST(StoredRows, QuotientsAreThoseOfADivision) {
  emulator::launch(
      [&] {
        if (ptx::thread_index() != 0) return;
        EXPECT_EQ(wrong_quotients<true>(2039), 0);
        EXPECT_EQ(wrong_quotients<false>(8191), 0);
        constexpr float infinity = std::numeric_limits<float>::infinity();
        constexpr float nan = std::numeric_limits<float>::quiet_NaN();
        const auto of = [](float x, float scale) {
          float q[8] = {x, 0.0F, 1.0F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F};
          stored::divide_by<true>(q, scale);
          EXPECT_TRUE(q[2] == 1.0F / scale || std::isnan(scale));
          return q[0];
        };
        EXPECT_EQ(of(1e38F, 1e-20F), infinity);  // saturates
        EXPECT_EQ(of(-1e38F, 1e-3F), -1e38F / 1e-3F);
        EXPECT_EQ(of(1e-40F, 1e-40F), 1.0F);
        EXPECT_EQ(of(3.0F, 0.0F), infinity);
        EXPECT_EQ(of(3.0F, infinity), 0.0F);
        for (const float zero : {0.0F, -0.0F}) {
          for (const float scale : {2.0F, -2.0F, 3.0F}) {
            EXPECT_EQ(std::signbit(of(zero, scale)), std::signbit(zero / scale)) << zero << " / " << scale;
          }
        }
        for (const float x : {infinity, -infinity, nan}) {
          EXPECT_TRUE(std::isnan(of(x, 2.0F)));
          EXPECT_TRUE(std::isnan(of(x, 0.0F)));
        }
        EXPECT_TRUE(std::isnan(of(0.0F, 0.0F)));
        EXPECT_TRUE(std::isnan(of(3.0F, nan)));
      },
      {.blocks = 1, .threads = 32}, {});
}

/// More stretches than a block notes at once, of sequences that share entries: some tokens of the second
/// round go to rows of tokens of the first.
TEST(AppendKernel, KeepsTheOrderOfTokensAcrossRounds) {
  harness::AppendCase c;
  c.heads_kv = 1;
  c.head_dim = 16;
  c.head_dim_v = 8;
  c.entries = 70;
  c.entry_rows = 16;
  c.batch = 2 * append_words + 100;
  for (std::int64_t n = 0; n < c.batch; ++n) {
    c.index.push_back(n % 7 == 0 ? 3 : n % 69);
    c.before.push_back(n % 7 == 0 ? n % 4 : n / 69 % 16);
  }
  harness::AppendCall call(c);
  EmulatedCache runner;
  call.prepare();
  runner.append(call);
  EXPECT_TRUE(call.correct());
}

/// Teams of blocks share the words of sequences in entries of their own: more than a block notes at once,
/// most of them without rows; and a few, which some blocks have nothing of.
TEST(AppendKernel, TeamsWriteEveryRowOnce) {
  for (const std::int64_t batch : {append_words * 3, 5}) {
    harness::AppendCase c;
    c.dtype = DType::e4m3;
    c.scales = 4;
    c.heads_kv = 1;
    c.head_dim = 16;
    c.head_dim_v = 0;
    c.batch = batch;
    c.seqlen_new = c.entry_rows = 24;
    for (std::int64_t n = 0; n < batch; ++n) {
      c.before.push_back(n % 11 == 0 ? 3 : 0);
      c.used.push_back(n % 97 == 0 || batch == 5 ? 10 + n % 14 : 0);
    }
    harness::AppendCall call(c);
    for (const unsigned blocks : {100U, 33U, 4U}) {
      EmulatedCache runner(blocks);
      call.prepare();
      runner.append(call);
      EXPECT_TRUE(call.correct()) << blocks << " blocks";
    }
  }
}

TEST(AppendKernel, TheConfigFollowsFromTheJob) {
  AppendProblem problem;
  alignas(16) static std::byte memory[64];
  problem.k_new = {.data = memory, .dtype = DType::bf16, .row_stride = 64, .head_stride = 64};
  problem.k_cache = {.data = memory, .dtype = DType::e4m3, .row_stride = 64, .head_stride = 64};
  problem.head_dim_k = 64;
  EXPECT_EQ(choose_append_config(problem), (AppendConfig{.from = Stored::bf16, .to = Stored::e4m3}));
  problem.k_cache.data = memory + 4;
  EXPECT_FALSE(choose_append_config(problem).vectors);
  problem.k_cache.data = memory + 8;
  EXPECT_TRUE(choose_append_config(problem).vectors);
  problem.head_dim_k = 60;
  EXPECT_FALSE(choose_append_config(problem).vectors);
  problem.head_dim_k = 64;
  problem.cos = problem.sin = {.data = memory, .dtype = DType::bf16, .row_stride = 32};
  problem.interleaved = true;
  EXPECT_EQ(choose_append_config(problem), (AppendConfig{.from = Stored::bf16,
                                                         .to = Stored::e4m3,
                                                         .rotary = true,
                                                         .interleaved = true,
                                                         .f32_tables = false}));
}

/// What has nothing for the emulator: errors before a launch, and calls past the runner.
constexpr const char* filter = "-*KAndVInterleavedInOneTensor:*WithCheckTwoTokens*";

}  // namespace
}  // namespace tandem::kernel_tests

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (testing::GTEST_FLAG(filter) == "*") testing::GTEST_FLAG(filter) = tandem::kernel_tests::filter;
  static tandem::kernel_tests::EmulatedCache runner;
  tandem::harness::use_only(runner);
  return RUN_ALL_TESTS();
}
