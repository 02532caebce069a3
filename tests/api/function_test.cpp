// Functions of the caller's own: how they are built, their text, their derivative, and every error.
#include "tandem/function.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "api/make_problem.hpp"
#include "arguments.hpp"
#include "cpu/reference/function.hpp"
#include "harness/error_of.hpp"

namespace tandem {
namespace {

const float memory[24] = {};
const std::int32_t integers[24] = {};

std::vector<ConstTensor> captured() {
  return {ConstTensor(memory, DType::f32, {4}), ConstTensor(memory, DType::f32, {2, 3, 4}),
          ConstTensor(integers, DType::i32, {24})};
}

Function score(const std::string& text) {
  return Function::parse(text, Function::Kind::score, captured());
}

TEST(Function, OperatorsMakeTheSameAsText) {
  FunctionBuilder f;
  for (const ConstTensor& t : captured()) f.capture(t);
  const Expression slope = f.read(0, {f.head()});
  const Expression alibi = f.score() + slope * (f.key() - f.query());
  EXPECT_EQ(f.score_function(alibi).text(), "add(s, mul(t0[h], real(sub(k, q))))");
  EXPECT_EQ(f.score_function(where(f.query() >= f.key(), 2.0 * tanh(f.score() / 2.0), f.constant(-INFINITY)))
                .text(),
            "where(le(k, q), mul(2.0, tanh(div(s, 2.0))), -inf)");
  const Expression window = (f.query() - f.key() <= 3) & ~(f.query() % 2 == 1);
  EXPECT_EQ(f.mask_function(window).text(), "and(le(sub(q, k), 3), not(eq(mod(q, 2), 1)))");
}

TEST(Function, TextRoundTrips) {
  for (const char* const text :
       {"s", "add(s, 1.0)", "add(s, t0[h])", "add(s, t1[b, mod(q, 3), h])", "mul(s, 1e-20)",
        "where(le(k, q), s, -inf)", "$0=sub(q, k); add(s, real(mul($0, $0)))", "min(s, nan)",
        "where(ne(and(t2[q], t2[k]), 0), s, neg(s))",
        "$0=tanh(s); $1=mul($0, $0); add($1, sqrt(add($1, 1.0)))", "add(s, real(floordiv(sub(nk, nq), -3)))",
        "where(not(lt(b, 1)), exp(s), log(abs(s)))", "where(xor(true, eq(q, k)), s, sigmoid(s))",
        "where(eq(wide(q), wide(3000000000)), stop(s), fmod(floor(s), round(sin(s))))",
        "where(lt(wide(int(s)), mul(wide(k), wide(-2147483649))), log2(cos(s)), log1p(erf(s)))"}) {
    const Function f = score(text);
    EXPECT_EQ(f.text(), text);
    const Function again = score(f.text());
    ASSERT_EQ(again.nodes().size(), f.nodes().size()) << text;
    for (std::size_t n = 0; n < f.nodes().size(); ++n) {
      FunctionNode a = f.nodes()[n];
      FunctionNode b = again.nodes()[n];
      if (std::isnan(a.value) && std::isnan(b.value)) a.value = b.value = 0.0;
      EXPECT_EQ(a, b) << text << ", node " << n;
    }
  }
}

TEST(Function, TextTakesWhatItNeverPrints) {
  EXPECT_EQ(score(" add ( s ,+1 ) ").text(), "add(s, 1.0)");
  EXPECT_EQ(score("$a=mul(s, s); $b=neg(s); add($a, $b)").text(), "add(mul(s, s), neg(s))");
  EXPECT_EQ(score("$a=mul(s, s); $a").text(), "mul(s, s)");
  EXPECT_EQ(score("add(s, -1.5E+3)").text(), "add(s, -1500.0)");
  EXPECT_EQ(score("mul(s, real(eq(wide(q), -9007199254740993)))").text(),
            "mul(s, real(eq(wide(q), add(mul(wide(-2097153), wide(4294967296)), wide(4294967295)))))");
  EXPECT_EQ(score("stop(real(stop(q)))").text(), "stop(real(q))");
}

/// A value that two of a function's operations share is computed once.
TEST(Function, EqualValuesAreOneNode) {
  EXPECT_EQ(score("add(mul(s, s), mul(s, s))").nodes().size(),
            score("$0=mul(s, s); add($0, $0)").nodes().size());
}

/// Values that the reference gives as dual numbers, by each read of a differentiated tensor.
TEST(Function, GradientsOfWhatItReads) {
  const std::vector<int> both{0, 1};
  const Function f = Function::parse("add(mul(s, t0[h]), where(le(k, q), t1[b, mod(q, 3), h], t0[0]))",
                                     Function::Kind::score, captured(), both);
  EXPECT_EQ(f.gradients().size(), 3U);
  EXPECT_TRUE(f.is_differentiated(0) && f.is_differentiated(1) && !f.is_differentiated(2));
  // What runs without gradients is what it is without them.
  const Function plain = Function::parse(f.text(), Function::Kind::score, captured());
  EXPECT_TRUE(std::equal(f.nodes().begin(), f.nodes().end(), plain.nodes().begin(), plain.nodes().end()));
  EXPECT_TRUE(plain.gradients().empty());
  EXPECT_EQ(plain.all_nodes().size(), plain.nodes().size());
  EXPECT_GT(f.all_nodes().size(), f.nodes().size());
  for (const FunctionGradient& g : f.gradients()) {
    EXPECT_EQ(f.all_nodes()[static_cast<std::size_t>(g.read)].op, FunctionOp::read);
  }
}

TEST(Function, AConstantFactorHasNoGradientNodesOfItsOwn) {
  const std::vector<int> first{0};
  const Function f = Function::parse("add(s, t0[h])", Function::Kind::score, captured(), first);
  ASSERT_EQ(f.gradients().size(), 1U);
  EXPECT_EQ(f.all_nodes()[static_cast<std::size_t>(f.gradients()[0].slope)].value, 1.0);
}

TEST(Function, ErrorsOfGradients) {
  const auto fails = [](const std::string& text, Function::Kind kind, int number, const std::string& words) {
    const std::vector<int> wanted{number};
    EXPECT_EQ(
        error_of(Status::invalid_argument, [&] { return Function::parse(text, kind, captured(), wanted); }),
        words);
  };
  fails("s", Function::Kind::score, 3,
        "function: t3 is to be differentiated, but there are 3 captured tensors");
  fails("s", Function::Kind::score, 2,
        "function: t2 is to be differentiated, but is i32; gradients are of f32, f16 and bf16");
  fails("le(k, q)", Function::Kind::mask, 0,
        "function: a mask function has no gradients; differentiate tensors of the score function");
}

/// The derivative nodes, evaluated, are the oracle's dual numbers.
TEST(Function, DerivativeIsTheSlopeOfEveryOperation) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> scores(-3.0, 3.0);
  for (const char* const text : {"s",
                                 "neg(s)",
                                 "abs(s)",
                                 "mul(s, s)",
                                 "div(s, add(2.0, mul(s, s)))",
                                 "div(1.0, add(5.0, s))",
                                 "exp(s)",
                                 "log(add(4.0, s))",
                                 "sqrt(add(4.0, s))",
                                 "tanh(s)",
                                 "sigmoid(s)",
                                 "min(s, mul(s, s))",
                                 "max(s, mul(2.0, s))",
                                 "where(lt(s, 0.5), mul(2.0, s), tanh(s))",
                                 "sub(1.0, mul(s, sigmoid(s)))",
                                 "3.0",
                                 "real(int(s))",
                                 "sin(s)",
                                 "cos(mul(2.0, s))",
                                 "erf(s)",
                                 "log2(add(4.0, s))",
                                 "log1p(exp(s))",
                                 "add(floor(s), mul(s, round(s)))",
                                 "fmod(s, 0.75)",
                                 "fmod(4.0, add(4.5, s))",
                                 "add(exp(mul(s, 0.5)), mul(s, real(q)))"}) {
    const Function f = score(text);
    for (int n = 0; n < 50; ++n) {
      const reference::Pair pair{.score = scores(random), .query = 3, .key = 2};
      const double wanted = reference::FunctionValue(f).at(pair).slope;
      const double step = 1e-6;
      reference::Pair more = pair;
      more.score += step;
      const double difference =
          (reference::FunctionValue(f).at(more).value - reference::FunctionValue(f).at(pair).value) / step;
      EXPECT_NEAR(reference::FunctionValue(f, f.slope()).at(pair).value, wanted, 1e-6)
          << text << " at " << pair.score;
      if (std::abs(difference - wanted) > 1e-3) {  // only where the step crosses a kink
        const double there = reference::FunctionValue(f).at(more).slope;
        EXPECT_GT(std::abs(there - wanted), 1e-3) << text << " at " << pair.score;
      }
    }
  }
}

/// A stop counts as a number, for the oracle, too.
TEST(Function, StopHasNoDerivative) {
  const reference::Pair pair{.score = 0.75};
  const auto slope = [&](const char* text) {
    const Function f = score(text);
    const double made = reference::FunctionValue(f, f.slope()).at(pair).value;
    EXPECT_DOUBLE_EQ(made, reference::FunctionValue(f).at(pair).slope) << text;
    return made;
  };
  EXPECT_EQ(slope("stop(s)"), 0.0);
  EXPECT_DOUBLE_EQ(slope("mul(s, stop(tanh(s)))"), std::tanh(0.75));
  EXPECT_DOUBLE_EQ(slope("add(mul(s, 3.0), stop(mul(s, s)))"), 3.0);
  const std::vector<int> first{0};
  const Function f = Function::parse("add(stop(t0[h]), s)", Function::Kind::score, captured(), first);
  EXPECT_TRUE(f.gradients().empty());
}

void expect_text_error(const std::string& text, const std::string& message,
                       Function::Kind kind = Function::Kind::score) {
  EXPECT_THAT(error_of(Status::invalid_argument, [&] { return Function::parse(text, kind, captured()); }),
              testing::HasSubstr(message))
      << text;
}

/// What is said of BackwardArgs::captured_gradients.
TEST(FunctionErrors, OfCapturedGradients) {
  static float gradients[2][24];
  const std::vector<int> first{0};
  const Function f =
      Function::parse("add(s, mul(t0[h], t1[b, 0, h]))", Function::Kind::score, captured(), first);
  const auto fails = [&](std::vector<Tensor> views, const std::string& words) {
    BackwardArgs args = test::dense_backward();
    args.score_function = &f;
    args.captured_gradients = views;
    EXPECT_EQ(error_of(Status::invalid_argument, [&] { make_problem(args); }), words);
  };
  const Tensor fits(gradients[0], DType::f32, {4});
  BackwardArgs args = test::dense_backward();
  args.score_function = &f;
  args.captured_gradients = {&fits, 1};
  EXPECT_TRUE(make_problem(args).wants_captured_gradients());
  args.dq = args.dk = args.dv = {};
  EXPECT_NO_THROW(make_problem(args)) << "alone";
  fails({Tensor(gradients[0], DType::f32, {5})},
        "captured_gradients[0] has shape (5); it must be that of t0, (4)");
  Tensor deep = fits;
  deep.rank = 1 << 20;  // no more sizes are read than a tensor has
  fails({deep},
        "captured_gradients[0] has 1048576 dimensions; it must be of the shape of the captured tensor");
  fails({Tensor(gradients[0], DType::f16, {4})}, "captured_gradients[0] is f16; convert it to f32");
  fails({Tensor{}, Tensor(gradients[0], DType::f32, {2, 3, 4})},
        "captured_gradients[1] is given, but score_function does not differentiate t1; name it where the "
        "function "
        "is made");
  fails({fits, {}, {}, {}},
        "captured_gradients has 4 tensors, but score_function captures 3; pass one for each at most");
  Tensor over = fits;
  over.data = const_cast<float*>(memory);
  fails({over}, "captured_gradients[0] shares memory with t0; an output needs memory of its own");
}

TEST(FunctionErrors, OfText) {
  expect_text_error("", "at character 1, in \"\", there must be a number, a leaf");
  expect_text_error("add(s, foo)", "at character 8");
  expect_text_error("add(s 1)", "there must be ')'");
  expect_text_error("add(s, 1) s", "there must be the end");
  expect_text_error("add(s)", "add takes 2 arguments, not 1");
  expect_text_error("add(s, 1..2)", "there must be a number");
  expect_text_error("$a s", "there must be");
  expect_text_error("mul(s, 9223372036854775808)", "there must be a number, if whole of 64 bits at most");
  expect_text_error(std::string(4000, '(') + "s", "there must be");
  std::string deep = "s";
  for (int n = 0; n < 5000; ++n) deep = "neg(" + deep + ")";
  expect_text_error(deep, "fewer values inside one another");
}

TEST(FunctionErrors, OfTypes) {
  expect_text_error("mod(s, 2)", "mod takes integers, but an argument is real");
  expect_text_error("and(s, 1)", "and takes booleans or integers");
  expect_text_error("t0[s]", "index 0 of t0 is real");
  expect_text_error("t0[q, k]", "t0 has 1 dimensions but 2 indices");
  expect_text_error("t9[q]", "t9 is not captured; there are 3");
  expect_text_error("t0[4]", "index 0 of t0 is 4, but that dimension has size 4");
  expect_text_error("lt(s, 0.0)", "a mask function has no score", Function::Kind::mask);
}

TEST(FunctionErrors, OfExpressionsOfAnotherFunction) {
  FunctionBuilder mine;
  FunctionBuilder other;
  const std::array<float, 4> numbers{};
  const int captured = mine.capture({numbers.data(), DType::f32, {4}});
  const Expression foreign = other.key();
  EXPECT_THROW(mine.read(captured, {foreign}), Error);
  EXPECT_THROW(mine.convert(foreign, FunctionType::real), Error);
  EXPECT_THROW(mine.score_function(foreign), Error);
  EXPECT_THROW(mine.mask_function(foreign), Error);
}

TEST(FunctionErrors, OfSize) {
  std::string text = "$0=s; ";
  for (int n = 0; n < 300; ++n) text += "$0=add(tanh($0), " + std::to_string(n) + ".5); ";
  expect_text_error(text + "$0", "more than 512 operations");
  FunctionBuilder f;
  EXPECT_THROW(f.capture(ConstTensor(memory, DType::e4m3, {4})), Error);
  EXPECT_THROW(f.capture(ConstTensor(memory, DType::f32, {4, 0})), Error);
  EXPECT_THROW(f.capture(ConstTensor(memory, DType::f32, {1, 1, 1, 1, 1})), Error);
  for (std::size_t n = 0; n < Function::max_captured; ++n) f.capture(ConstTensor(memory, DType::f32, {4}));
  EXPECT_THROW(f.capture(ConstTensor(memory, DType::f32, {4})), Error);
}

/// Errors of calls. `change` breaks a forward call that has a legal score function.
void expect_call_error(Status status, const std::string& message,
                       const std::function<void(ForwardArgs&)>& change) {
  const Function legal = score("add(s, t0[h])");
  ForwardArgs args = test::dense_forward();
  args.score_function = &legal;
  ASSERT_NO_THROW(make_problem(args)) << "the arguments are wrong before they are broken";
  change(args);
  EXPECT_EQ(error_of(status, [&] { make_problem(args); }), message);
}

TEST(FunctionErrors, OfCalls) {
  const Function mask = Function::parse("le(k, q)", Function::Kind::mask);
  expect_call_error(Status::invalid_argument, "score_function is a mask function; pass it as the other",
                    [&](ForwardArgs& a) { a.score_function = &mask; });
  const Function empty;
  expect_call_error(Status::invalid_argument,
                    "mask_function is empty; make it with a FunctionBuilder or Function::parse",
                    [&](ForwardArgs& a) { a.mask_function = &empty; });
  expect_call_error(Status::unsupported,
                    "score_function runs with precision exact alone, not with fp8; leave the precision exact",
                    [](ForwardArgs& a) {
                      a.q.dtype = a.k.dtype = a.v.dtype = a.out.dtype = DType::bf16;
                      a.options.precision = Precision::fp8;
                    });
  const Function of_the_host = score("add(s, t0[h])");
  expect_call_error(Status::invalid_argument, "t0 is on cpu but q is on cuda:0; move it there",
                    [&](ForwardArgs& a) {
                      a.score_function = &of_the_host;
                      a.q.device.kind = a.k.device.kind = a.v.device.kind = Device::Kind::cuda;
                    });
  const Function by_query = score("add(s, t0[q])");
  expect_call_error(
      Status::invalid_argument,
      "score_function reads t0 at the query, up to 4, but dimension 0 of t0 has size 4; make it 5, or "
      "index another way",
      [&](ForwardArgs& a) { a.score_function = &by_query; });
  const std::vector<ConstTensor> nothing{ConstTensor(nullptr, DType::f32, {4})};
  const Function unreadable = Function::parse("t0[h]", Function::Kind::score, nothing);
  expect_call_error(Status::invalid_argument, "t0 has shape (4) but no data; its address is NULL",
                    [&](ForwardArgs& a) { a.score_function = &unreadable; });
  Function overlapping;
  expect_call_error(Status::invalid_argument, "out shares memory with t0; an output needs memory of its own",
                    [&](ForwardArgs& a) {
                      const std::vector<ConstTensor> out{ConstTensor(a.out.data, DType::f32, {4})};
                      overlapping = Function::parse("t0[h]", Function::Kind::score, out);
                      a.score_function = &overlapping;
                    });
}

}  // namespace
}  // namespace tandem
