// Numbers of functions as parameters of their kernels: which share a kernel, and that no text depends on a
// number that the digest leaves out.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "gpu/function_source.hpp"
#include "tandem/error.hpp"

namespace tandem::gpu {
namespace {

constexpr float slopes[8] = {};
constexpr int slopes_wanted[] = {0};
const std::vector<ConstTensor> captured{ConstTensor(slopes, DType::f32, {8})};

Function score(const std::string& text) {
  return Function::parse(text, Function::Kind::score, captured, slopes_wanted);
}
Function mask(const std::string& text) {
  return Function::parse(text, Function::Kind::mask, captured);
}
unsigned long long digest_of(const Function& f) {
  return functions_config({.score = f.kind() == Function::Kind::score ? &f : nullptr,
                           .mask = f.kind() == Function::Kind::mask ? &f : nullptr,
                           .gradients = f.kind() == Function::Kind::score ? 1U : 0U})
      .digest;
}

TEST(FunctionNumbers, OtherNumbersTakeOneKernel) {
  EXPECT_EQ(digest_of(score("mul(s, 0.37)")), digest_of(score("mul(s, 0.38)")));
  EXPECT_EQ(digest_of(score("mul(tanh(div(s, 20.0)), 20.0)")),
            digest_of(score("mul(tanh(div(s, 30.0)), 30.0)")));
  EXPECT_EQ(digest_of(score("mul(s, sigmoid(mul(t0[h], mul(s, 0.7))))")),
            digest_of(score("mul(s, sigmoid(mul(t0[h], mul(s, -3.0))))")));
  EXPECT_EQ(digest_of(mask("or(lt(k, 100), le(sub(q, k), 64))")),
            digest_of(mask("or(lt(k, 7), le(sub(q, k), 1000))")));
}

/// The compiler leaves out what 0 and 1 do; NaN and infinities have no text of numbers; a division by a power
/// of two is a shift; an index that may be below 0 counts from the end.
TEST(FunctionNumbers, WhatDecidesTheTextIsInTheDigest) {
  for (const char* const other : {"1.0", "-1.0", "0.0", "-0.0", "inf", "-inf", "nan", "1e-40", "3e38"}) {
    SCOPED_TRACE(other);
    EXPECT_NE(digest_of(score(std::string("mul(s, ") + other + ")")), digest_of(score("mul(s, 0.37)")));
  }
  EXPECT_NE(digest_of(score("mul(s, 1.0)")), digest_of(score("mul(s, 0.0)")));
  EXPECT_NE(digest_of(score("mul(s, 1e-40)")), digest_of(score("mul(s, 2e-40)")));
  EXPECT_NE(digest_of(mask("eq(mod(k, 3), 2)")), digest_of(mask("eq(mod(k, 5), 2)")));
  EXPECT_NE(digest_of(mask("lt(k, floordiv(q, 16))")), digest_of(mask("lt(k, floordiv(q, 32))")));
  EXPECT_NE(digest_of(mask("or(eq(mod(k, 3), 0), lt(k, 3))")),
            digest_of(mask("or(eq(mod(k, 5), 0), lt(k, 5))")));
  EXPECT_NE(digest_of(score("add(s, t0[3])")), digest_of(score("add(s, t0[-3])")));
  EXPECT_NE(digest_of(score("add(s, t0[add(k, 3)])")), digest_of(score("add(s, t0[add(k, 4)])")));
  EXPECT_EQ(digest_of(score("add(s, t0[int(mul(real(k), 3.0))])")),
            digest_of(score("add(s, t0[int(mul(real(k), 4.0))])")));
  EXPECT_NE(digest_of(mask("lt(wide(k), wide(3000000000))")),
            digest_of(mask("lt(wide(k), wide(4000000000))")));
}

TEST(FunctionNumbers, AreWhatAFunctionHas) {
  const Function scaled = score("add(mul(s, 0.375), div(1.0, 20.0))");
  const Function prefix = mask("or(lt(k, 100), le(sub(q, k), -64))");
  const FunctionParams params = function_params({.score = &scaled, .mask = &prefix});
  EXPECT_EQ(params.numbers[0].integer, 100);
  EXPECT_EQ(params.numbers[1].integer, -64);
  EXPECT_EQ(params.numbers[2].real, 0.375F);
  EXPECT_EQ(params.numbers[3].real, 20.0F);
  EXPECT_EQ(params.reciprocals[3], 1.0F / 20.0F);
}

/// The sum of `count` numbers from `first` on, and the score.
Function sum_of(int count, double first) {
  std::string text = "s";
  for (int n = 0; n < count; ++n) text = "add(mul(" + text + ", 1.0), " + std::to_string(first + n) + ")";
  return score(text);
}

TEST(FunctionNumbers, WhatFindsNoPlaceStandsInTheText) {
  constexpr int most = most_numbers;
  EXPECT_EQ(digest_of(sum_of(most, 2.5)), digest_of(sum_of(most, 3.25)));
  EXPECT_NE(digest_of(sum_of(most + 8, 2.5)), digest_of(sum_of(most + 8, 3.25)));
  const Function many = sum_of(most + 8, 2.5);
  const std::string text = function_source({.score = &many});
  EXPECT_NE(text.find("params->numbers[31].real"), std::string::npos);
  EXPECT_EQ(text.find("params->numbers[32]"), std::string::npos);
  EXPECT_EQ(function_params({.score = &many}).numbers[most - 1].real, 2.5F + most - 1);
  // A mask function's numbers come first.
  const Function first = mask("lt(k, 77)");
  EXPECT_EQ(function_params({.score = &many, .mask = &first}).numbers[most - 1].real, 2.5F + most - 2);
}

/// Random functions. `other` makes another number of one that may be any: of reals and of integers.
class RandomFunctions {
 public:
  RandomFunctions(unsigned seed, bool other) : random_(seed), other_(other) {
    for (const ConstTensor& t : captured) builder_.capture(t);
    values_ = {builder_.score(), builder_.head(), builder_.query(), builder_.key(), builder_.seqlen_k()};
    conditions_ = {builder_.key() <= builder_.query()};
  }

  Function score() {
    for (int n = 0; n < 12; ++n) grow();
    return builder_.score_function(builder_.score() + any(values_) * any(values_), slopes_wanted);
  }
  Function mask() {
    values_.erase(values_.begin());
    for (int n = 0; n < 12; ++n) grow();
    return builder_.mask_function(any(conditions_) | (any(values_) < any(values_)));
  }

 private:
  int below(int n) { return std::uniform_int_distribution(0, n - 1)(random_); }
  Expression any(const std::vector<Expression>& of) {
    return of[static_cast<std::size_t>(below(static_cast<int>(of.size())))];
  }
  Expression integer() {
    const int value = 20 + below(40);
    return builder_.constant((below(2) != 0 ? 1 : -1) * (other_ ? value + 100 : value));
  }
  Expression number() {
    constexpr float specials[] = {0.0F, -0.0F, 1.0F, -1.0F, INFINITY, -INFINITY, NAN, 1e-40F, 2e38F};
    if (below(3) == 0) return builder_.constant(specials[below(9)]);
    if (below(2) == 0) return integer();
    const float value = std::uniform_real_distribution(2.0F, 9.0F)(random_);
    return builder_.constant((below(2) != 0 ? 1.0F : -1.0F) * (other_ ? 11.0F * value : value));
  }
  Expression whole() { return builder_.convert(any(values_), FunctionType::integer); }

  void grow() {
    constexpr FunctionOp binary[] = {FunctionOp::add,    FunctionOp::subtract, FunctionOp::multiply,
                                     FunctionOp::divide, FunctionOp::minimum,  FunctionOp::maximum,
                                     FunctionOp::add,    FunctionOp::multiply};
    constexpr FunctionOp unary[] = {FunctionOp::negate, FunctionOp::absolute, FunctionOp::exp,
                                    FunctionOp::tanh,   FunctionOp::sigmoid,  FunctionOp::log};
    constexpr int divisors[] = {3, 8, 16, -4};
    switch (below(7)) {
      case 0:
      case 1: values_.push_back(builder_.apply(binary[below(8)], {any(values_), number()})); break;
      case 2: values_.push_back(builder_.apply(binary[below(8)], {number(), any(values_)})); break;
      case 3: values_.push_back(builder_.apply(unary[below(6)], {any(values_)})); break;
      case 4: values_.push_back(whole() % divisors[below(4)]); break;
      case 5: values_.push_back(builder_.read(0, {minimum(builder_.key() * 7, builder_.head() - 3)})); break;
      default:
        conditions_.push_back(any(values_) < number());
        values_.push_back(where(any(conditions_), any(values_), number()));
    }
  }

  FunctionBuilder builder_;
  std::mt19937 random_;
  bool other_;
  std::vector<Expression> values_;
  std::vector<Expression> conditions_;
};

TEST(FunctionNumbers, NoTextDependsOnThem) {
  int differ = 0;
  for (unsigned seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(seed);
    const Function scores[2] = {RandomFunctions(seed, false).score(), RandomFunctions(seed, true).score()};
    const Function masks[2] = {RandomFunctions(seed, false).mask(), RandomFunctions(seed, true).mask()};
    std::string texts[2];
    for (int i = 0; i < 2; ++i) {
      texts[i] = function_source({.score = &scores[i], .mask = &masks[i], .gradients = 1});
      ASSERT_NE(texts[i], "");
    }
    // It begins with the digest. Beyond the last place numbers stand in it.
    const std::string past = "numbers[" + std::to_string(most_numbers - 1) + "]";
    if (texts[0].find(past) == std::string::npos) {
      EXPECT_EQ(texts[0], texts[1]);
    }
    differ += scores[0].text() != scores[1].text() || masks[0].text() != masks[1].text() ? 1 : 0;
  }
  EXPECT_GT(differ, 400);
}

/// With equal digests texts are equal, whichever digit of a function differs.
TEST(FunctionNumbers, ADigestHasOneText) {
  int compared = 0;
  for (unsigned seed = 0; seed < 100; ++seed) {
    const std::string text = RandomFunctions(seed, false).score().text();
    const Function f = score(text);
    for (std::size_t at = 0; at < text.size(); ++at) {
      if (text[at] < '0' || text[at] > '9') continue;
      std::string changed = text;
      changed[at] = text[at] == '9' ? '0' : static_cast<char>(text[at] + 1);
      SCOPED_TRACE(text + "\n" + changed);
      std::optional<Function> parsed;
      try {
        parsed = score(changed);
      } catch (const Error&) {
        continue;  // it is no function
      }
      const Function& g = *parsed;
      const CallFunctions first{.score = &f, .gradients = 1};
      const CallFunctions second{.score = &g, .gradients = 1};
      if (functions_config(first).digest != functions_config(second).digest) continue;
      EXPECT_EQ(function_source(first), function_source(second));
      ++compared;
    }
  }
  EXPECT_GT(compared, 500);
}

}  // namespace
}  // namespace tandem::gpu
