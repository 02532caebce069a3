// The forward pass in 8 bits: its results against fp64 by the recipe (harness/recipe_reference.hpp), what the
// recipes cost in accuracy, what strict promises, and the corners of quantized values and scales.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "api/make_problem.hpp"
#include "cpu/cpu.hpp"
#include "harness/changes.hpp"
#include "harness/element.hpp"
#include "harness/expect.hpp"
#include "harness/recipe_reference.hpp"
#include "harness/runner.hpp"
#include "problem/recipe.hpp"
#include "problem/recipe_of.hpp"

namespace tandem::harness {
namespace {

constexpr Precision precisions[] = {Precision::fp8, Precision::int8};

double root_mean_square(const std::vector<double>& got, const std::vector<double>& expected) {
  double sum = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) sum += (got[i] - expected[i]) * (got[i] - expected[i]);
  return std::sqrt(sum / static_cast<double>(got.size()));
}

/// The paper's N(0, 1) + N(0, 100) * Bernoulli(0.001).
void fill_with_outliers(Box& box, Random& random) {
  for (std::int64_t i = 0; i < box.numel(); ++i) {
    const double x = random.normal();
    box.set(i, random.chance(0.001) ? x + 10.0 * random.normal() : x);
  }
}

Case paper_case() {
  Case c = with({}, {.dtype = DType::f16, .heads = 4, .head_dim = 128, .seqlen_q = 512, .seqlen_k = 4096});
  change(c, {.lse = false, .threads = 2});
  return c;
}

double error_of(Call& call, const Recipe& recipe, const std::vector<double>& expected) {
  call.spec.options.precision = Precision::fp8;  // any that is not exact: the recipe says the rest
  call.prepare(Pass::forward);
  const Problem problem = make_problem(call.forward_args());
  cpu::Config config = cpu::choose(problem, 2);
  config.recipe = recipe;
  const cpu::Plan plan(problem, config);
  std::vector<std::byte> workspace(plan.workspace_bytes);
  cpu::run(plan, workspace);
  return root_mean_square(call.out.values(), expected);
}

/// The bars: against one e4m3 scale a tensor, the paper's recipe is 2.2 times more accurate, int8 6.
TEST(Quantized, ErrorOnThePapersDistribution) {
  Call call(paper_case());
  Random random(1);
  for (Box* box : {&call.q, &call.k, &call.v}) fill_with_outliers(*box, random);
  const std::vector<double> expected = reference::forward(call.problem()).out;

  Recipe papers = fp8_recipe;
  papers.smooth_k = false;
  Recipe one_scale = papers;
  one_scale.qk_scales = one_scale.v_scales = ScaleGroup::tensor;
  one_scale.rotate_qk = false;
  const double plain = error_of(call, one_scale, expected);
  EXPECT_GT(plain, 2.2 * error_of(call, papers, expected));
  EXPECT_GT(plain, 2.2 * error_of(call, fp8_recipe, expected));
  EXPECT_GT(plain, 2.2 * error_of(call, strict(fp8_recipe), expected));
  EXPECT_GT(plain, 6.0 * error_of(call, int8_recipe, expected));
  EXPECT_GT(plain, 6.0 * error_of(call, strict(int8_recipe), expected));
}

/// Largest errors of out and lse that 8 bits may cost, q's, k's and v's rounding included, where these are
/// normal numbers and the scale is moderate. What a backend may add to that, `follows_recipe` says.
struct Tolerance {
  double out;
  double lse;
};
Tolerance tolerance_of(Precision precision) {
  return precision == Precision::fp8 ? Tolerance{0.5, 0.25} : Tolerance{0.1, 0.05};
}

testing::AssertionResult close(const Call& call, const reference::Forward& expected, Precision precision) {
  const Tolerance bound = tolerance_of(precision);
  const auto near = [](const char* name, const Box& box, const std::vector<double>& values,
                       double tolerance) {
    for (std::int64_t i = 0; box.given() && i < box.numel(); ++i) {
      const double want = values[static_cast<std::size_t>(i)];
      const double got = box.get(i);
      if (got == want || std::abs(got - want) <= tolerance) continue;
      return testing::AssertionFailure() << name << "[" << i << "] is " << got << ", expected " << want;
    }
    return testing::AssertionSuccess();
  };
  if (testing::AssertionResult out = near("out", call.out, expected.out, bound.out); !out) return out;
  return near("lse", call.lse, expected.lse, bound.lse);
}

void run_all_precisions(const Case& c) {
  Call call(c);
  const reference::Forward expected = reference::forward(call.problem());
  for (const Precision precision : precisions) {
    for (const bool strict_setting : {false, true}) {
      change(call.spec, {.precision = precision, .strict = strict_setting});
      call.max_logits = {};  // all but the last of the four have them
      if (precision != Precision::int8 || !strict_setting) call.ask_for_max_logits();
      const RecipeExpected by_recipe = expect_recipe(call);
      on_every_runner(c, [&](Runner& runner) {
        SCOPED_TRACE(name_of(precision));
        call.prepare(Pass::forward);
        runner.forward(call);
        EXPECT_TRUE(close(call, expected, precision));
        EXPECT_TRUE(follows_recipe(call, by_recipe));
        for (const Box* box : call.outputs(Pass::forward)) {
          EXPECT_TRUE(!box->given() || box->changed_outside().empty());
        }
      });
    }
  }
}

/// Every feature crossed with every precision: rows that see no key, packed and unused rows, masks, softcap,
/// sinks, GQA.
TEST(Quantized, RandomProblems) {
  for (std::uint64_t seed = 0; seed < static_cast<std::uint64_t>(effort(12)); ++seed) {
    Case c = with(random_case(seed, 260), {.dtype = seed % 2 == 0 ? DType::f16 : DType::bf16});
    change(c, {.split_size = 0, .scales = 0, .amplitude = 1.0});
    if (c.options.scale && std::abs(*c.options.scale) > 0.3F) c.options.scale.reset();
    run_all_precisions(c);
  }
}

TEST(Quantized, HeadDimensions) {
  for (const std::int64_t head_dim : {64, 96, 128, 192, 256}) {
    Case c = with({}, {.dtype = DType::bf16, .batch = 3, .heads_q = 4, .heads_kv = 2, .head_dim = head_dim});
    change(c, {.packed = true, .lengths_q = {130, 0, 40}, .lengths_k = {200, 7, 129}, .causal = true});
    run_all_precisions(c);
  }
}

/// The bounds are tight: where out's gain is 2 % off, or the LSE by as much, or one element missing, results
/// are refused. So are fp8's on sequences as long as the tests have.
TEST(Quantized, AGainErrorOfTwoPercentIsNoticed) {
  for (const auto& [rows, keys] : {std::pair{160, 700}, {20, 6250}}) {
    for (const Precision precision : precisions) {
      for (const bool strict_setting : {false, true}) {
        Case c = with({}, {.dtype = DType::bf16, .heads_q = 2, .seqlen_q = rows, .seqlen_k = keys});
        change(c, {.causal = true, .precision = precision, .strict = strict_setting});
        Call call(c);
        call.ask_for_max_logits();
        const RecipeExpected expected = expect_recipe(call);
        SCOPED_TRACE(std::string(name_of(precision)) + (strict_setting ? ", strict: " : ": ") + c.describe());
        EXPECT_LT(expected.gain_bound, 0.018);
        call.prepare(Pass::forward);
        forward(call.forward_args(), {.threads = 1});
        ASSERT_TRUE(follows_recipe(call, expected));
        const std::vector<double> right = call.out.values();
        for (const double gain : {0.98, 1.02}) {
          for (std::int64_t n = 0; n < call.out.numel(); ++n)
            call.out.set(n, gain * right[static_cast<std::size_t>(n)]);
          EXPECT_FALSE(follows_recipe(call, expected)) << "a gain of " << gain;
        }
        for (std::int64_t n = 0; n < call.out.numel(); ++n)
          call.out.set(n, right[static_cast<std::size_t>(n)]);
        const auto largest = std::ranges::max_element(right) - right.begin();
        call.out.set(largest, 0.0);
        EXPECT_FALSE(follows_recipe(call, expected)) << "an element is missing";
        call.out.set(largest, right[static_cast<std::size_t>(largest)]);
        ASSERT_TRUE(follows_recipe(call, expected));
        for (std::int64_t n = 0; n < call.lse.numel(); ++n) call.lse.set(n, 1.02 * call.lse.get(n));
        EXPECT_FALSE(follows_recipe(call, expected)) << "lse is off";
        call.lse = {};
        ASSERT_TRUE(follows_recipe(call, expected));
        for (std::int64_t n = 0; n < call.max_logits.numel(); ++n)
          call.max_logits.set(n, 1.02 * call.max_logits.get(n));
        EXPECT_FALSE(follows_recipe(call, expected)) << "max_logits is off";
      }
    }
  }
}

/// The bits of rows [0, count) of every head.
std::vector<double> first_rows(const Box& box, std::int64_t count, std::int64_t row) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < count * row; ++i) values.push_back(box.get(i));
  return values;
}

/// With strict, rows of a causal sequence do not notice what comes after them; without, K's mean does.
TEST(Quantized, StrictResultsDoNotDependOnTheFuture) {
  for (const Precision precision : precisions) {
    for (const bool strict_setting : {false, true}) {
      Case whole_spec = with({}, {.dtype = DType::bf16, .heads = 2, .head_dim_qk = 64, .head_dim_v = 32});
      change(whole_spec, {.seqlen = 300, .causal = true, .precision = precision, .strict = strict_setting});
      Call whole(whole_spec);
      for (const std::int64_t length : {2, 77, 128, 201}) {
        Call part(with(whole_spec, {.seqlen = length}));
        for (std::int64_t i = 0; i < part.q.numel(); ++i) part.q.set(i, whole.q.get(i));
        for (std::int64_t i = 0; i < part.k.numel(); ++i) part.k.set(i, whole.k.get(i));
        for (std::int64_t i = 0; i < part.v.numel(); ++i) part.v.set(i, whole.v.get(i));
        on_every_runner(whole_spec, [&](Runner& runner) {
          whole.prepare(Pass::forward);
          runner.forward(whole);
          part.prepare(Pass::forward);
          runner.forward(part);
          EXPECT_EQ(first_rows(whole.out, length, 64) == part.out.values(), strict_setting || length == 300)
              << name_of(precision) << ", " << length << " rows";
          for (std::int64_t head = 0; strict_setting && head < 2; ++head) {
            for (std::int64_t i = 0; i < length; ++i) {
              ASSERT_EQ(whole.lse.get(head * 300 + i), part.lse.get(head * length + i));
            }
          }
        });
      }
    }
  }
}

TEST(Quantized, ThreadsAndBatchesDoNotChangeABit) {
  for (const Precision precision : precisions) {
    Case c = with({}, {.dtype = DType::f16, .batch = 2, .heads_q = 4, .heads_kv = 2, .head_dim_qk = 96});
    change(c, {.head_dim_v = 72, .seqlen_q = 150, .seqlen_k = 333, .precision = precision});
    Call call(c);
    Call alone(with(c, {.batch = 1}));
    const auto copy_second = [](const Box& from, Box& to) {
      for (std::int64_t i = 0; i < to.numel(); ++i) to.set(i, from.get(to.numel() + i));
    };
    copy_second(call.q, alone.q);
    copy_second(call.k, alone.k);
    copy_second(call.v, alone.v);
    on_every_runner(c, [&](Runner& runner) {
      std::vector<std::byte> first;
      for (const int threads : {1, 3, 7}) {  // whole heads by thread, and heads shared by threads
        call.spec.threads = threads;
        call.prepare(Pass::forward);
        runner.forward(call);
        if (threads == 1) first = call.out.raw();
        EXPECT_EQ(call.out.raw(), first) << threads << " threads";
      }
      alone.prepare(Pass::forward);
      runner.forward(alone);
      const std::vector<std::byte> bits = alone.out.raw();
      EXPECT_TRUE(
          std::equal(bits.begin(), bits.end(), first.begin() + static_cast<std::ptrdiff_t>(bits.size())));
    });
  }
}

/// Exactly the rows that see a NaN key are NaN, as with 16 bits; and the row of a NaN query.
TEST(Quantized, NaNReachesTheRowsThatSeeIt) {
  for (const Precision precision : precisions) {
    for (const bool strict_setting : {false, true}) {
      Case c = with({}, {.dtype = DType::bf16, .head_dim = 32, .seqlen = 200, .window_left = 20});
      change(c, {.window_right = 7, .precision = precision, .strict = strict_setting});
      Call call(c);
      constexpr std::int64_t bad_key = 100;
      constexpr std::int64_t bad_query = 9;
      call.k.set(bad_key * 32 + 5, std::numeric_limits<double>::quiet_NaN());
      call.q.set(bad_query * 32 + 31, std::numeric_limits<double>::infinity());
      on_every_runner(c, [&](Runner& runner) {
        call.prepare(Pass::forward);
        runner.forward(call);
        for (std::int64_t i = 0; i < 200; ++i) {
          const bool bad = (bad_key >= i - 20 && bad_key <= i + 7) || i == bad_query;
          EXPECT_EQ(std::isnan(call.lse.get(i)), bad) << name_of(precision) << " row " << i;
          for (std::int64_t c2 = 0; c2 < 32; ++c2) ASSERT_EQ(std::isnan(call.out.get(i * 32 + c2)), bad) << i;
        }
      });
    }
  }
}

/// The bar: at 128k of context the error is at most twice that at 1k, in every setting.
TEST(Quantized, ErrorGrowsLittleWithTheContext) {
  const auto errors = [](std::int64_t keys) {
    Call call(with(paper_case(), {.heads = 1, .head_dim = 64, .seqlen_q = 48, .seqlen_k = keys}));
    Random random(3);
    for (Box* box : {&call.q, &call.k, &call.v}) fill_with_outliers(*box, random);
    const std::vector<double> expected = reference::forward(call.problem()).out;
    std::vector<double> found;
    for (const Recipe& recipe : {fp8_recipe, int8_recipe}) {
      found.push_back(error_of(call, recipe, expected));
      found.push_back(error_of(call, strict(recipe), expected));
    }
    return found;
  };
  const std::vector<double> few = errors(1024);
  const std::vector<double> many = errors(131072);
  for (std::size_t i = 0; i < few.size(); ++i) EXPECT_LT(many[i], 2.0 * few[i]) << i << " of " << few[i];
}

}  // namespace
}  // namespace tandem::harness
