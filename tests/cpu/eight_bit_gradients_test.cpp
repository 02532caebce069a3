// The backward pass in 8 bits: its gradients against fp64 by the recipe (harness/gradient_recipe.hpp), what
// they are worth beside exact ones, and what strict and the order of sums promise.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <tuple>
#include <vector>

#include "cpu/reference/reference.hpp"
#include "harness/changes.hpp"
#include "harness/gradient_recipe.hpp"

namespace tandem::harness {
namespace {

Case in_8_bits(Case c, bool strict_setting = false) {
  if (c.dtype != DType::f16) c.dtype = DType::bf16;
  change(c, {.softcap = 0.0F, .split_size = 0, .precision = Precision::int8, .strict = strict_setting});
  change(c, {.sink = false, .lse = true, .scales = 0, .amplitude = 1.0});
  c.options.backward_precision = Precision::int8;
  return c;
}

/// Runs both passes in one thread. The gradients that the recipe has of what forward leaves.
GradientsExpected differentiate(Call& call) {
  call.prepare(Pass::forward);
  forward(call.forward_args(), {.threads = 1});
  GradientsExpected by_recipe = expect_gradients_in_8_bits(call);
  call.prepare(Pass::backward);
  backward(call.backward_args(), {.threads = 1});
  return by_recipe;
}

void run_by_recipe(const Case& c) {
  Call call(c);
  on_every_runner(c, [&](Runner& runner) { run_by_gradient_recipe(runner, call); });
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
/// Gains are those of sixteen heads: a head's first rows, of few keys, are most of its causal gradients, and
/// in full attention each row of dO is rounded once for all keys, so that one head's may be off by 0.4 %.
TEST(EightBitGradients, GradientsAreLikeExactOnes) {
  for (const bool strict_setting : {false, true}) {
    for (const bool causal : {false, true}) {
      constexpr std::int64_t rows = 300;
      Call call(in_8_bits(with({}, {.heads = 16, .head_dim = 64, .seqlen = rows, .causal = causal}),
                          strict_setting));
      const GradientsExpected by_recipe = differentiate(call);
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

/// Equal logits, whose P are all rounded alike.
TEST(EightBitGradients, RowsOfEqualLogitsLoseNothing) {
  for (const std::int64_t keys : {300, 384, 470}) {
    Call call(
        in_8_bits(with({}, {.heads = 16, .head_dim = 64, .seqlen_q = 300, .seqlen_k = keys, .scale = 0.0F})));
    const GradientsExpected by_recipe = differentiate(call);
    EXPECT_TRUE(follows_recipe(call, by_recipe));
    EXPECT_NEAR(likeness(call.dv, by_recipe.dv.unrounded, keys).gain, 1.0, 1e-3) << keys << " keys";
  }
}

/// Cosines of dq, dk and dv with exact ones; 1 of gradients that are all 0.
std::vector<double> cosines(Call& call) {
  const GradientsExpected by_recipe = differentiate(call);
  EXPECT_TRUE(follows_recipe(call, by_recipe));
  const reference::Backward exact = reference::backward(call.problem());
  std::vector<double> found;
  for (const auto& [box, expected] :
       {std::pair{&call.dq, &exact.dq}, {&call.dk, &exact.dk}, {&call.dv, &exact.dv}}) {
    const bool zeros = std::ranges::all_of(*expected, [](double x) { return x == 0.0; });
    found.push_back(zeros ? 1.0 : likeness(*box, *expected, 1).cosine);
    EXPECT_EQ(zeros, std::ranges::all_of(box->values(), [](double x) { return x == 0.0; }));
  }
  return found;
}

/// Rows [first, last) of a tensor of one head.
void change_rows(Box& box, std::int64_t first, std::int64_t last, const std::function<double(double)>& f) {
  const std::int64_t dim = box.numel() / 400;
  for (std::int64_t n = first * dim; n < last * dim; ++n) box.set(n, f(box.get(n)));
}

/// What factors that are known beforehand might miss: of keys without value the gradients of S are those of
/// delta alone, of a gradient of the LSE alone dO has no scale, and a largest row may leave the others little
/// of e4m3's range.
TEST(EightBitGradients, FactorsFitInputsThatAreNotNormal) {
  const auto times = [](double factor) { return [factor](double x) { return factor * x; }; };
  const auto biased = [](Box& box, double size) {
    for (std::int64_t n = 0; n < box.numel(); ++n)
      box.set(n, box.get(n) + size * std::sin(static_cast<double>(n % 64 + 1) * 2.0));
  };
  const std::vector<std::pair<const char*, std::function<void(Call&)>>> inputs{
      // If strict, K's mean stays, times what roundings of a row of dS add up to.
      {"biased", [&](Call& c) { biased(c.k, c.spec.options.strict ? 1.0 : 8.0), biased(c.v, 2.0); }},
      {"outliers",
       [&](Call& c) {
         for (Box* box : {&c.q, &c.k, &c.v, &c.dout}) {
           for (std::int64_t n = 0; n < box->numel(); n += 997) box->set(n, 10.0 * box->get(n));
         }
       }},
      {"a block without value", [&](Call& c) { change_rows(c.v, 128, 256, times(0.0)); }},
      {"no value", [&](Call& c) { change_rows(c.v, 0, 400, times(0.0)); }},
      {"small V first", [&](Call& c) { change_rows(c.v, 0, 128, times(0x1p-8)); }},
      {"a block of large dO", [&](Call& c) { change_rows(c.dout, 128, 256, times(0x1p10)); }},
      {"a row of large dO", [&](Call& c) { change_rows(c.dout, 300, 301, times(0x1p10)); }},
      {"dO 0", [&](Call& c) { change_rows(c.dout, 0, 400, times(0.0)); }},
      {"small dO", [&](Call& c) { change_rows(c.dout, 0, 400, times(0x1p-60)); }},
      {"a dominant key", [&](Call& c) {
         biased(c.q, 1.0);
         change_rows(c.k, 7, 8, times(0.0));
         for (std::int64_t n = 7 * 64; n < 8 * 64; ++n)
           c.k.set(n, 2.0 * std::sin(static_cast<double>(n % 64 + 1) * 2.0));
       }}};
  for (const bool strict_setting : {false, true}) {
    for (const bool dlse : {false, true}) {
      for (const auto& [name, prepare] : inputs) {
        Call call(in_8_bits(with({}, {.head_dim = 64, .seqlen = 400, .causal = true, .dlse = dlse}),
                            strict_setting));
        prepare(call);
        const std::vector<double> found = cosines(call);
        SCOPED_TRACE(testing::Message() << name << (strict_setting ? " strict" : "") << (dlse ? " dLSE" : "")
                                        << ": " << found[0] << " " << found[1] << " " << found[2]);
        EXPECT_GT(*std::ranges::min_element(found), 0.998);
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
    for (Box Call::*const with_nan : {&Call::q, &Call::k, &Call::dout}) {
      constexpr std::int64_t row = 150;
      Call call(in_8_bits(with({}, {.head_dim = 64, .seqlen = 300, .causal = true}), strict_setting));
      (call.*with_nan).set(row * 64 + 5, std::numeric_limits<double>::quiet_NaN());
      const GradientsExpected expected = differentiate(call);
      EXPECT_TRUE(follows_recipe(call, expected));
      const bool of_key = with_nan == &Call::k;
      EXPECT_TRUE(std::isnan(call.dq.get(row * 64)));
      EXPECT_FALSE(std::isnan(call.dq.get((row - 1) * 64)));
      EXPECT_EQ(std::isnan(call.dq.get(299 * 64)), of_key);
      EXPECT_TRUE(std::isnan(call.dk.get(row * 64)) && std::isnan(call.dv.get(row * 64)));
      EXPECT_EQ(std::isnan(call.dk.get(299 * 64)), of_key);  // whose queries are NaN
      EXPECT_EQ(std::isnan(call.dv.get(151 * 64)), of_key);
    }
  }
}

/// The bits of dq, dk and dv of a call whose inputs are changed after the forward pass.
std::vector<std::byte> bits_after(const Case& c, const std::function<void(Call&)>& f, int threads = 1) {
  Call call(c);
  call.prepare(Pass::forward);
  forward(call.forward_args(), {.threads = 1});
  f(call);
  call.prepare(Pass::backward);
  backward(call.backward_args(), {.threads = threads});
  std::vector<std::byte> all;
  for (const Box* box : {&call.dq, &call.dk, &call.dv}) {
    const std::vector<std::byte> more = bits(*box);
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

/// Of 300 queries and 200 keys the first hundred see none.
TEST(EightBitGradients, RowsThatSeeNoKeyHaveNoPartWhateverTheyHold) {
  for (const bool strict_setting : {false, true}) {
    Case c = with({}, {.head_dim = 64, .seqlen_q = 300, .seqlen_k = 200, .causal = true, .dlse = true});
    c = in_8_bits(c, strict_setting);
    const auto holding = [](double x) {
      return [x](Call& call) {
        for (std::int64_t n = 0; n < 64; ++n) {
          call.q.set(20 * 64 + n, x);
          call.dout.set(10 * 64 + n, x);
          call.out.set(30 * 64 + n, x);
        }
        call.dlse.set(15, x);
      };
    };
    const std::vector<std::byte> zeros = bits_after(c, holding(0.0));
    EXPECT_EQ(bits_after(c, holding(std::numeric_limits<double>::quiet_NaN())), zeros);
    EXPECT_EQ(bits_after(c, holding(std::numeric_limits<double>::infinity())), zeros);
  }
}

TEST(EightBitGradients, SequencesDoNotChangeOneAnother) {
  Case c = with({}, {.heads_q = 4, .heads_kv = 2, .head_dim = 64, .packed = true, .causal = true});
  change(c, {.lengths_q = {130, 0, 70}, .lengths_k = {150, 3, 80}});
  const auto first_rows = [&](double factor) {
    const std::vector<std::byte> all = bits_after(in_8_bits(c), [&](Call& call) {
      for (Box* box : {&call.q, &call.dout}) {
        for (std::int64_t n = 130 * 4 * 64; n < box->numel(); ++n) box->set(n, factor * box->get(n));
      }
    });
    return std::vector<std::byte>(all.begin(), all.begin() + std::ptrdiff_t{130} * 4 * 64 * 2);
  };
  EXPECT_EQ(first_rows(1.0), first_rows(0x1p12));
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
  const Case c =
      in_8_bits(with({}, {.batch = 3, .heads_q = 6, .heads_kv = 3, .head_dim = 64, .seqlen = 200}));
  const auto nothing = [](Call&) {};
  EXPECT_EQ(bits_after(c, nothing, 4), bits_after(c, nothing, 1));
}

}  // namespace
}  // namespace tandem::harness
