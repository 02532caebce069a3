// Parts of functions on the CPU that a whole call does not show: what interval arithmetic knows of blocks,
// and how much memory a program takes.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <random>

#include "api/make_problem.hpp"
#include "cpu/cpu.hpp"
#include "cpu/functions/bounds.hpp"
#include "cpu/reference/function.hpp"

namespace tandem::cpu {
namespace {

const std::int32_t table[64] = {3, 1, 4, 1, 5};
/// Documents of 16 positions, with what no 32 bits hold at the end, and bytes of two heads.
const std::array<std::int64_t, 64> documents = [] {
  std::array<std::int64_t, 64> numbers{};
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<std::int64_t>(i) / 16;
  numbers[63] = std::int64_t{1} << 40;
  return numbers;
}();
/// Numbers that 32 bits do not hold, documents of 16 positions apart in their upper halves alone.
const std::array<std::int64_t, 64> hashes = [] {
  std::array<std::int64_t, 64> numbers{};
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = 7 + (static_cast<std::int64_t>(i) / 16 - 1) * (std::int64_t{1} << 40);
  }
  return numbers;
}();
const std::int8_t flags[2][64] = {{1, 1, 0, 1}, {0, 1}};

Function mask_of(const std::string& text) {
  ConstTensor every_second(table, DType::i32, {32});
  every_second.stride[0] = 2;
  const std::vector<ConstTensor> captured{
      ConstTensor(table, DType::i32, {64}), ConstTensor(documents.data(), DType::i64, {64}),
      ConstTensor(flags, DType::s8, {2, 64}), every_second, ConstTensor(hashes.data(), DType::i64, {64})};
  return Function::parse(text, Function::Kind::mask, captured);
}

constexpr const char* masks[] = {
    "le(k, q)",
    "le(k, add(q, sub(nk, nq)))",
    "le(abs(sub(q, k)), 9)",
    "and(le(k, q), lt(sub(q, k), 20))",
    "eq(floordiv(k, 16), floordiv(q, 16))",
    "eq(mod(sub(q, k), 8), 0)",
    "or(lt(k, 10), le(k, q))",
    "not(eq(q, k))",
    "xor(lt(q, 20), lt(k, 20))",
    "ne(mul(sub(q, 20), sub(k, 20)), 0)",
    "le(neg(k), neg(q))",
    "lt(min(q, k), max(mul(2, h), 3))",
    "where(lt(h, 2), le(k, q), lt(k, 40))",
    "eq(t0[q], t0[k])",
    "eq(t1[q], t1[k])",
    "and(eq(t1[q], t1[k]), le(k, q))",
    "lt(t1[add(k, 20)], t1[sub(q, 20)])",
    "le(t1[sub(k, 100)], 2)",
    "ne(t2[0, k], 0)",
    "ne(t2[mod(h, 2), k], 0)",
    "lt(t3[k], t3[q])",
    "le(t1[t0[k]], 0)",
    "eq(t4[q], t4[k])",
    "and(le(t4[k], t4[q]), lt(sub(t4[q], t4[k]), 1099511627776))",
    "ne(mod(add(mul(t4[q], 31), t1[k]), 3), 0)",
    "lt(max(t4[k], wide(q)), where(lt(h, 2), t4[q], t1[q]))",
    "le(int(t4[k]), k)",
    "lt(abs(neg(t4[k])), floordiv(t4[q], 2))",
    "bool(t4[k])",
    "lt(wide(mul(q, 50000)), mul(wide(k), 50000))",
    "le(t4[t1[k]], 7)",
    "lt(real(k), 12.5)",
    "bool(sub(k, 7))",
    "eq(int(lt(k, q)), 1)",
    "ne(and(q, k), 0)",
    "lt(floordiv(k, sub(q, 5)), mod(k, sub(3, q)))",
    "le(mul(mul(q, 100000), 100000), k)",
    "eq(b, 1)",
    "true",
};

/// What is said of a block holds for every pair of it.
TEST(FunctionBounds, HoldForEveryPair) {
  std::mt19937 random(3);
  const auto between = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  const auto program = std::make_unique<FunctionProgram>();
  for (const char* const text : masks) {
    const Function f = mask_of(text);
    compile(f, ProgramOf::value, LanesOf::any_rows, *program);
    for (int n = 0; n < 200; ++n) {
      const std::int64_t query = between(0, 50);
      const std::int64_t key = between(0, 50);
      const std::int64_t head = between(0, 3);
      const PairRange range{.batch = between(0, 1),
                            .seqlen_q = 60,
                            .seqlen_k = 64,
                            .head = {.low = head, .high = between(head, 3)},
                            .query = {.low = query, .high = query + between(0, 9)},
                            .key = {.low = key, .high = key + between(0, 13)}};
      const Visible said = visible_of(*program, range);
      if (said == Visible::some) continue;
      reference::FunctionValue value(f);
      for (std::int64_t h = range.head.low; h <= range.head.high; ++h) {
        for (std::int64_t q = range.query.low; q <= range.query.high; ++q) {
          for (std::int64_t k = range.key.low; k <= range.key.high; ++k) {
            const reference::Pair pair{
                .batch = range.batch, .head = h, .query = q, .key = k, .seqlen_q = 60, .seqlen_k = 64};
            ASSERT_EQ(value.at(pair).value != 0.0, said == Visible::all) << text << " at " << q << ", " << k;
          }
        }
      }
    }
  }
}

TEST(FunctionBounds, KnowTheUsualMasks) {
  const auto program = std::make_unique<FunctionProgram>();
  const auto visible = [&](const char* text, Interval query, Interval key) {
    compile(mask_of(text), ProgramOf::value, LanesOf::any_rows, *program);
    return visible_of(*program, {.seqlen_q = 60, .seqlen_k = 64, .head = {}, .query = query, .key = key});
  };
  EXPECT_EQ(visible("le(k, q)", {32, 47}, {0, 31}), Visible::all);
  EXPECT_EQ(visible("le(k, q)", {32, 47}, {48, 63}), Visible::none);
  EXPECT_EQ(visible("le(k, q)", {32, 47}, {32, 47}), Visible::some);
  EXPECT_EQ(visible("and(le(k, q), lt(sub(q, k), 16))", {32, 47}, {0, 15}), Visible::none);
  EXPECT_EQ(visible("eq(floordiv(k, 16), floordiv(q, 16))", {32, 47}, {32, 40}), Visible::all);
  EXPECT_EQ(visible("eq(floordiv(k, 16), floordiv(q, 16))", {32, 47}, {0, 31}), Visible::none);
  EXPECT_EQ(visible("le(abs(sub(q, k)), 9)", {32, 34}, {30, 36}), Visible::all);
  EXPECT_EQ(visible("or(lt(k, 10), le(k, q))", {0, 3}, {4, 9}), Visible::all);
  EXPECT_EQ(visible("eq(t0[q], t0[k])", {0, 3}, {4, 9}), Visible::some);
  EXPECT_EQ(visible("eq(t1[q], t1[k])", {32, 47}, {32, 39}), Visible::all);
  EXPECT_EQ(visible("eq(t1[q], t1[k])", {32, 47}, {0, 31}), Visible::none);
  EXPECT_EQ(visible("eq(t1[q], t1[k])", {32, 48}, {40, 47}), Visible::some);
  EXPECT_EQ(visible("eq(t4[q], t4[k])", {32, 47}, {32, 39}), Visible::all);
  EXPECT_EQ(visible("eq(t4[q], t4[k])", {32, 47}, {0, 31}), Visible::none);
  EXPECT_EQ(visible("eq(t1[q], wide(k))", {32, 33}, {40, 41}), Visible::none);
  EXPECT_EQ(visible("lt(t1[k], 100)", {0, 3}, {200, 300}), Visible::none) << "clamped to the last";
}

/// Memory of values that both row and key decide is used again: a chain of any length takes two of them.
TEST(FunctionProgram, ReusesMemory) {
  std::string text = "add(s, real(sub(q, k)))";
  for (int n = 0; n < 50; ++n) text = "tanh(add(" + text + ", 0.5))";
  const auto program = std::make_unique<FunctionProgram>();
  compile(Function::parse(text, Function::Kind::score), ProgramOf::value, LanesOf::any_rows, *program);
  EXPECT_GT(program->count, 100);
  EXPECT_LE(program->words, 3 * function_keys * function_lanes);
}

/// What depends on the distance between query and key alone is computed once for each distance; the score's
/// last step takes its place.
TEST(FunctionProgram, FindsWhatDependsOnTheDistance) {
  const auto program = std::make_unique<FunctionProgram>();
  const auto shapes = [&](const std::string& text, Function::Kind kind, LanesOf lanes) {
    const std::vector<ConstTensor> captured{ConstTensor(table, DType::i32, {64})};
    compile(Function::parse(text, kind, captured), ProgramOf::value, lanes, *program);
    std::array<int, 5> count{};
    for (int n = 0; n < program->count; ++n)
      ++count[static_cast<std::size_t>(program->steps[n].result.shape)];
    return count;
  };
  using Shapes = std::array<int, 5>;  // uniform, rows, keys, pairs, distances
  constexpr auto score = Function::Kind::score;
  constexpr auto mask = Function::Kind::mask;
  constexpr auto one_head = LanesOf::consecutive_queries;
  EXPECT_EQ(shapes("add(s, real(t0[add(sub(q, k), 9)]))", score, one_head), (Shapes{1, 1, 1, 1, 4}));
  EXPECT_TRUE(program->value.is_score);
  EXPECT_EQ(shapes("add(s, real(t0[add(sub(q, k), 9)]))", score, LanesOf::any_rows), (Shapes{1, 1, 1, 5, 0}));
  EXPECT_EQ(shapes("le(k, add(q, sub(nk, nq)))", mask, one_head), (Shapes{3, 2, 1, 0, 1}));
  EXPECT_EQ(shapes("le(add(k, q), 9)", mask, one_head), (Shapes{1, 1, 1, 2, 0}));
  EXPECT_EQ(shapes("le(add(k, 2147483647), q)", mask, one_head), (Shapes{1, 1, 2, 1, 0})) << "it may wrap";
  EXPECT_EQ(shapes("mul(real(q), 0.5)", score, one_head), (Shapes{1, 3, 0, 0, 0}));
  EXPECT_FALSE(program->value.is_score);
}

/// A plan holds no address of itself: its copy runs when it is gone.
TEST(FunctionPlan, CanBeCopied) {
  const std::vector<ConstTensor> captured{ConstTensor(table, DType::i32, {64})};
  const Function score = Function::parse("add(s, real(t0[k]))", Function::Kind::score, captured);
  const Function mask = mask_of("le(t0[q], t0[k])");
  std::vector<float> values(64 * 8, 0.5F);
  std::vector<float> out(64 * 8);
  ForwardArgs args;
  args.q = args.k = args.v = ConstTensor(values.data(), DType::f32, {1, 64, 1, 8});
  args.out = Tensor(out.data(), DType::f32, {1, 64, 1, 8});
  args.score_function = &score;
  args.mask_function = &mask;
  const auto results = [&](const Plan& plan) {
    std::vector<std::byte> workspace(plan.workspace_bytes);
    run(plan, workspace);
    return out;
  };
  auto first = std::make_unique<Plan>(make_problem(args), 1);
  const std::vector<float> expected = results(*first);
  const Plan copy = *first;
  std::memset(static_cast<void*>(first.get()), 0xFF, sizeof(Plan));
  first.reset();
  EXPECT_EQ(results(copy), expected);
}

}  // namespace
}  // namespace tandem::cpu
