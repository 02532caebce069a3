// The backward pass in 8 bits: its gradients against fp64 by the recipe (harness/gradient_recipe.hpp), what
// they are worth beside exact ones, and what strict and the order of sums promise.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "cpu/reference/reference.hpp"
#include "harness/changes.hpp"
#include "harness/gradient_recipe.hpp"
#include "harness/runner.hpp"

namespace tandem::harness {
namespace {

Case in_8_bits(Case c, bool strict_setting = false) {
  if (c.dtype != DType::f16) c.dtype = DType::bf16;
  change(c, {.softcap = 0.0F, .split_size = 0, .precision = Precision::int8, .strict = strict_setting});
  change(c, {.sink = false, .lse = true, .scales = 0, .amplitude = 1.0});
  c.options.backward_precision = Precision::int8;
  return c;
}

void run_by_recipe(const Case& c) {
  Call call(c);
  on_every_runner(c, [&](Runner& runner) {
    call.prepare(Pass::forward);
    runner.forward(call);
    const GradientsExpected expected = expect_gradients_in_8_bits(call);
    call.prepare(Pass::backward);
    runner.backward(call);
    EXPECT_TRUE(follows_recipe(call, expected));
    for (const Box* box : call.outputs(Pass::backward)) {
      EXPECT_TRUE(!box->given() || box->changed_outside().empty());
    }
  });
}

/// Masks, windows, packed and unused rows, GQA, gradients of the LSE, gradients that are not wanted or added.
TEST(EightBitGradients, RandomProblems) {
  for (std::uint64_t seed = 0; seed < static_cast<std::uint64_t>(effort(6)); ++seed) {
    Case c = in_8_bits(random_case(seed, 200), seed % 2 == 0);
    if (c.options.scale && std::abs(*c.options.scale) > 0.3F) c.options.scale.reset();
    run_by_recipe(c);
  }
}

TEST(EightBitGradients, HeadDimensions) {
  for (const std::int64_t head_dim : {40, 96, 256}) {
    for (const bool strict_setting : {false, true}) {
      Case c = with({}, {.batch = 3, .heads_q = 4, .heads_kv = 2, .head_dim = head_dim, .dlse = true});
      change(c, {.packed = true, .lengths_q = {130, 0, 40}, .lengths_k = {200, 7, 129}, .causal = true});
      run_by_recipe(in_8_bits(c, strict_setting));
    }
  }
}

struct Likeness {
  double cosine, gain, bias;
};

/// `bias`: the mean over tokens of a head's errors, in units of what independent errors of their size have.
Likeness likeness(const Box& got, const std::vector<double>& exact, std::int64_t rows) {
  double product = 0.0;
  double squares = 0.0;
  double own = 0.0;
  double error = 0.0;
  double of_means = 0.0;
  const std::int64_t of_row = got.numel() / rows;
  for (std::int64_t c = 0; c < of_row; ++c) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < rows; ++i) {
      const double x = got.get(i * of_row + c);
      const double y = exact[static_cast<std::size_t>(i * of_row + c)];
      product += x * y;
      squares += y * y;
      own += x * x;
      error += (x - y) * (x - y);
      sum += x - y;
    }
    of_means += sum * sum;
  }
  return {.cosine = product / std::sqrt(squares * own),
          .gain = product / squares,
          .bias = std::sqrt(of_means / error)};
}

/// Of normal numbers: cosines with exact gradients, and gains, which errors of single elements hide. What the
/// roundings of P and dS add is no more alike from token to token than independent errors are (1, within what
/// 64 channels tell). Where one gradient is 2 % off, or an element is missing, the recipe's bounds show it.
TEST(EightBitGradients, GradientsAreLikeExactOnes) {
  for (const bool strict_setting : {false, true}) {
    for (const bool causal : {false, true}) {
      constexpr std::int64_t rows = 700;
      Call call(in_8_bits(with({}, {.head_dim = 64, .seqlen = rows, .causal = causal}), strict_setting));
      call.prepare(Pass::forward);
      forward(call.forward_args(), {.threads = 1});
      const GradientsExpected by_recipe = expect_gradients_in_8_bits(call);
      call.prepare(Pass::backward);
      backward(call.backward_args(), {.threads = 1});
      const reference::Backward expected = reference::backward(call.problem());
      for (const auto& [name, box, exact, of_recipe] :
           {std::tuple{"dq", &call.dq, &expected.dq, &by_recipe.dq},
            {"dk", &call.dk, &expected.dk, &by_recipe.dk},
            {"dv", &call.dv, &expected.dv, &by_recipe.dv}}) {
        const Likeness whole = likeness(*box, *exact, rows);
        const Likeness rounding = likeness(*box, of_recipe->unrounded, rows);
        SCOPED_TRACE(testing::Message()
                     << name << (strict_setting ? " strict" : "") << (causal ? " causal" : "") << ": cosine "
                     << whole.cosine << ", gain " << whole.gain << "; rounding: cosine " << rounding.cosine
                     << ", gain " << rounding.gain << ", bias " << rounding.bias);
        EXPECT_GT(whole.cosine, 0.999);
        EXPECT_NEAR(whole.gain, 1.0, 0.004);
        EXPECT_NEAR(rounding.gain, 1.0, 0.004);
        EXPECT_LT(rounding.bias, 1.5);
        ASSERT_TRUE(follows_recipe(call, by_recipe));
        const std::vector<double> right = box->values();
        for (std::int64_t n = 0; n < box->numel(); ++n)
          box->set(n, 1.02 * right[static_cast<std::size_t>(n)]);
        EXPECT_FALSE(follows_recipe(call, by_recipe));
        for (std::int64_t n = 0; n < box->numel(); ++n) box->set(n, right[static_cast<std::size_t>(n)]);
        const auto largest = std::ranges::max_element(right) - right.begin();
        box->set(largest, 0.0);
        EXPECT_FALSE(follows_recipe(call, by_recipe));
        box->set(largest, right[static_cast<std::size_t>(largest)]);
      }
    }
  }
}

std::vector<std::byte> bits(const Box& box) {
  const auto* const first = static_cast<const std::byte*>(box.view().data);
  return {first, first + box.numel() * static_cast<std::int64_t>(size_of(box.dtype()))};
}

/// A NaN makes the gradients NaN that it has a part in, and no others.
TEST(EightBitGradients, NanStaysWithThosePairsThatHaveIt) {
  for (const bool strict_setting : {false, true}) {
    for (const bool of_key : {false, true}) {
      constexpr std::int64_t row = 150;
      Call call(in_8_bits(with({}, {.head_dim = 64, .seqlen = 300, .causal = true}), strict_setting));
      (of_key ? call.k : call.q).set(row * 64 + 5, std::numeric_limits<double>::quiet_NaN());
      call.prepare(Pass::forward);
      forward(call.forward_args(), {.threads = 1});
      const GradientsExpected expected = expect_gradients_in_8_bits(call);
      call.prepare(Pass::backward);
      backward(call.backward_args(), {.threads = 1});
      EXPECT_TRUE(follows_recipe(call, expected));
      EXPECT_TRUE(std::isnan(call.dq.get(row * 64)));
      EXPECT_FALSE(std::isnan(call.dq.get((row - 1) * 64)));
      EXPECT_EQ(std::isnan(call.dq.get(299 * 64)), of_key);
      EXPECT_TRUE(std::isnan(call.dk.get(row * 64)) && std::isnan(call.dv.get(row * 64)));
      EXPECT_EQ(std::isnan(call.dk.get(299 * 64)), of_key);  // whose queries are NaN
      EXPECT_FALSE(std::isnan(call.dk.get(151 * 64)) && !of_key);
    }
  }
}

/// A row's dq is, if strict, that of the sequence cut off behind the row.
TEST(EightBitGradients, StrictQueriesDoNotDependOnLaterRows) {
  const auto dq_of = [](std::int64_t rows) {
    Call call(in_8_bits(with({}, {.head_dim = 64, .seqlen = 300, .causal = true}), true));
    for (Box* box : {&call.q, &call.k, &call.v, &call.dout}) {
      for (std::int64_t n = rows * 64; n < box->numel(); ++n) box->set(n, 8.0 * box->get(n) + 1.0);
    }
    call.prepare(Pass::forward);
    forward(call.forward_args(), {.threads = 1});
    call.prepare(Pass::backward);
    backward(call.backward_args(), {.threads = 1});
    std::vector<double> values = call.dq.values();
    values.resize(static_cast<std::size_t>(100 * 64));
    return values;
  };
  EXPECT_EQ(dq_of(300), dq_of(100));
}

TEST(EightBitGradients, BitsDoNotDependOnThreads) {
  Call call(in_8_bits(with({}, {.batch = 3, .heads_q = 6, .heads_kv = 3, .head_dim = 64, .seqlen = 200})));
  std::vector<std::byte> first;
  for (const int threads : {1, 4}) {
    call.prepare(Pass::forward);
    forward(call.forward_args(), {.threads = 1});
    call.prepare(Pass::backward);
    backward(call.backward_args(), {.threads = threads});
    std::vector<std::byte> all = bits(call.dq);
    for (const Box* box : {&call.dk, &call.dv}) {
      const std::vector<std::byte> more = bits(*box);
      all.insert(all.end(), more.begin(), more.end());
    }
    if (first.empty()) first = all;
    EXPECT_EQ(all, first);
  }
}

}  // namespace
}  // namespace tandem::harness
