// Which mask functions are taken as windows, and what is left of them.
#include "problem/mask_window.hpp"

#include <gtest/gtest.h>

#include <string>

#include "api/make_problem.hpp"
#include "arguments.hpp"

namespace tandem::test {
namespace {

const std::int32_t documents[64] = {};

Function mask(const std::string& text) {
  const ConstTensor captured(documents, DType::i32, {64});
  return Function::parse(text, Function::Kind::mask, {&captured, 1});
}

ForwardArgs of_lengths(std::int64_t seqlen_q, std::int64_t seqlen_k) {
  ForwardArgs a = dense_forward();
  a.q = tensor(0, DType::f32, {2, seqlen_q, 4, 16});
  a.k = tensor(1, DType::f32, {2, seqlen_k, 2, 16});
  a.v = tensor(2, DType::f32, {2, seqlen_k, 2, 8});
  a.out = tensor(3, DType::f32, {2, seqlen_q, 4, 8});
  a.lse = {};
  return a;
}

/// "left right rest" of a call with the mask function.
std::string taken(const Function& f, ForwardArgs a) {
  a.mask_function = &f;
  const Problem p = make_problem(a);
  return std::to_string(p.window_left) + ' ' + std::to_string(p.window_right) + ' ' +
         (p.mask_function != nullptr ? p.mask_function->text() : "nothing");
}
std::string taken(const std::string& text, std::int64_t seqlen_q = 9, std::int64_t seqlen_k = 9) {
  return taken(mask(text), of_lengths(seqlen_q, seqlen_k));
}

TEST(MaskWindow, IsTheWholeOfAMaskOfBounds) {
  EXPECT_EQ(taken("le(k, q)"), "-1 0 nothing");
  EXPECT_EQ(taken("lt(k, add(q, 1))"), "-1 0 nothing");
  EXPECT_EQ(taken("le(q, k)"), "0 -1 nothing");
  EXPECT_EQ(taken("le(0, sub(q, k))"), "-1 0 nothing");
  EXPECT_EQ(taken("le(neg(q), neg(k))"), "-1 0 nothing");
  EXPECT_EQ(taken("not(lt(q, k))"), "-1 0 nothing");
  EXPECT_EQ(taken("and(le(k, q), le(sub(q, k), 4))"), "4 0 nothing");
  EXPECT_EQ(taken("and(le(k, q), lt(sub(q, k), 4))"), "3 0 nothing");
  EXPECT_EQ(taken("not(or(lt(q, k), lt(4, sub(q, k))))"), "4 0 nothing");
  EXPECT_EQ(taken("le(abs(sub(q, k)), 3)"), "3 3 nothing");
  EXPECT_EQ(taken("lt(abs(sub(k, q)), 3)"), "2 2 nothing");
  EXPECT_EQ(taken("lt(abs(add(sub(k, q), 1)), 3)"), "3 1 nothing");
  EXPECT_EQ(taken("and(le(k, add(q, 5)), le(k, add(q, 2)))"), "-1 2 nothing");
}

TEST(MaskWindow, LeavesTheOtherConditions) {
  EXPECT_EQ(taken("and(le(k, q), eq(t0[q], t0[k]))"), "-1 0 eq(t0[q], t0[k])");
  EXPECT_EQ(taken("and(and(ne(k, 3), le(k, q)), and(lt(sub(q, k), 4), not(eq(q, 1))))"),
            "3 0 and(ne(k, 3), not(eq(q, 1)))");
  EXPECT_EQ(taken("not(or(and(eq(k, 1), eq(q, 2)), lt(q, k)))"), "-1 0 not(and(eq(k, 1), eq(q, 2)))");
}

TEST(MaskWindow, CountsFromTheEndAsAWindowDoes) {
  const std::string from_end = "le(k, add(q, sub(nk, nq)))";
  EXPECT_EQ(taken(from_end), "-1 0 nothing");
  EXPECT_EQ(taken(from_end, 5, 9), "-1 0 nothing");
  EXPECT_EQ(taken("lt(sub(sub(q, nq), sub(k, nk)), 3)", 5, 9), "2 -1 nothing");
  EXPECT_EQ(taken("le(sub(k, nk), sub(q, 1))", 5, 9), "-1 -1 le(sub(k, nk), sub(q, 1))");
  EXPECT_EQ(taken("le(k, add(q, sub(nq, nk)))", 5, 9), "-1 -1 le(k, add(q, sub(nq, nk)))");
}

/// Positions count from the start, a Problem's window from the end.
TEST(MaskWindow, MovesByTheDifferenceOfLengths) {
  EXPECT_EQ(taken("le(k, q)", 9, 5), "-1 4 nothing");
  EXPECT_EQ(taken("le(k, q)", 5, 9), "-1 -1 le(k, q)");  // its right bound is -4
  EXPECT_EQ(taken("le(k, add(q, 4))", 5, 9), "-1 0 nothing");
  EXPECT_EQ(taken("le(sub(q, k), 2)", 5, 9), "6 -1 nothing");
  EXPECT_EQ(taken("le(sub(q, k), 2)", 9, 5), "-1 -1 le(sub(q, k), 2)");
}

TEST(MaskWindow, IsNotTakenWhereAWindowCannotSayIt) {
  for (const char* const text :
       {"lt(k, q)", "or(le(k, q), lt(k, 3))", "le(add(q, q), k)", "le(mul(q, 2), k)", "eq(q, k)", "le(k, 3)",
        "le(add(q, k), 3)", "le(real(k), real(q))", "le(k, t0[q])", "lt(q, k)", "le(abs(k), q)",
        "le(abs(sub(q, k)), -1)", "not(and(lt(q, k), eq(q, 1)))", "true"}) {
    EXPECT_EQ(taken(text), std::string("-1 -1 ") + text);
  }
}

/// Integers of 32 bits wrap: q + 2147483647 is negative from q 1 on.
TEST(MaskWindow, IsNotTakenWhereIntegersWrap) {
  for (const char* const text : {"le(k, add(q, 2147483647))", "le(k, sub(add(q, 1073741824), 1073741824))",
                                 "le(k, sub(sub(q, -2147483648), 5))"}) {
    EXPECT_EQ(taken(text), std::string("-1 -1 ") + text);
  }
  EXPECT_EQ(taken("le(k, add(q, 1000000000))"), "-1 1000000000 nothing");
}

TEST(MaskWindow, MeetsTheWindowOfTheCall) {
  const Function f = mask("and(le(k, add(q, 2)), le(sub(q, k), 4))");
  ForwardArgs a = of_lengths(9, 9);
  a.options.causal = true;
  EXPECT_EQ(taken(f, a), "4 0 nothing");
  a.options.causal = false;
  a.options.window_left = 3;
  a.options.window_right = 5;
  EXPECT_EQ(taken(f, a), "3 2 nothing");
}

TEST(MaskWindow, OfPackedSequencesNeedsTheSameLengths) {
  const Function f = mask("le(k, q)");
  ForwardArgs a = packed_forward();
  EXPECT_EQ(taken(f, a), "-1 -1 le(k, q)");
  EXPECT_EQ(taken(mask("le(k, add(q, sub(nk, nq)))"), a), "-1 0 nothing");
  a.k = tensor(1, DType::f32, {5, 2, 16});
  a.v = tensor(2, DType::f32, {5, 2, 8});
  a.cu_seqlens_k = a.cu_seqlens_q;
  EXPECT_EQ(taken(f, a), "-1 0 nothing");
  const std::int32_t used[2] = {1, 2};
  a.seqused_q = ConstTensor(used, DType::i32, {2});
  EXPECT_EQ(taken(f, a), "-1 -1 le(k, q)");
  a.seqused_k = a.seqused_q;
  EXPECT_EQ(taken(f, a), "-1 0 nothing");
}

/// Its bits are those of any other batch with that sequence, whose lengths may be given otherwise.
TEST(MaskWindow, IsNotTakenWithASplitSize) {
  ForwardArgs a = of_lengths(9, 9);
  a.options.split_size = 256;
  EXPECT_EQ(taken(mask("le(k, q)"), a), "-1 -1 le(k, q)");
}

TEST(MaskWindow, IsToldByExplain) {
  const Function f = mask("and(le(k, q), ne(k, 3))");
  ForwardArgs a = of_lengths(9, 9);
  a.mask_function = &f;
  const std::string text = explain(a);
  EXPECT_NE(text.find("mask: causal,"), std::string::npos) << text;
  EXPECT_NE(text.find("\nmask function: its bounds of the window are part of the mask above\n"
                      "mask function, the rest: ne(k, 3)\n"),
            std::string::npos)
      << text;
}

}  // namespace
}  // namespace tandem::test
