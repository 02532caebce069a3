// Every way in which the indices of a call can be wrong, and the whole message; and what they become.
#include <gtest/gtest.h>

#include <array>

#include "error_case.hpp"

namespace tandem::test {
namespace {

using F = ForwardArgs;
ForwardArgs choosing() {
  ForwardArgs a = dense_forward();
  a.indices = tensor(12, DType::i32, {2, 5, 3});
  return a;
}

TEST(Indices, BecomeThoseOfAProblem) {
  ForwardArgs a = choosing();
  static std::array<std::int64_t, 64> numbers{};
  for (std::size_t n = 0; n < numbers.size(); ++n) numbers[n] = static_cast<std::int64_t>(n);
  a.indices = Tensor(numbers.data(), DType::i64, {2, 5, 2, 3});
  a.topk_length = Tensor(numbers.data(), DType::i64, {2, 5});
  const Problem p = make_problem(a);
  EXPECT_EQ(p.indices.count, 3);
  EXPECT_EQ(p.indices.number(1, 4, 1, 2), 59);
  EXPECT_EQ(p.indices.length(0, 2), 2);
  EXPECT_EQ(p.indices.length(1, 4), 3) << "no more than there are";
  a.indices = Tensor(numbers.data(), DType::i64, {2, 5, 3});
  EXPECT_EQ(make_problem(a).indices.number(1, 4, 1, 2), 29) << "KV heads have them in common";
}

TEST(Indices, MayBeNone) {
  ForwardArgs a = choosing();
  a.indices = ConstTensor(nullptr, DType::i32, {2, 5, 0});
  EXPECT_TRUE(make_problem(a).indices.given());
}

using Forward = Case<ForwardArgs>;
class IndicesError : public testing::TestWithParam<Forward> {};
TEST_P(IndicesError, SaysRuleValueAndRemedy) {
  expect_message(GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    All, IndicesError,
    testing::Values(
        Forward{"shape", choosing, set(&F::indices, tensor(12, DType::i32, {2, 4, 3})),
                "indices has shape (2, 4, 3); it must be (batch, seqlen_q, topk) = (2, 5, 3)"},
        Forward{
            "shape_by_head", choosing, set(&F::indices, tensor(12, DType::i32, {2, 5, 4, 3})),
            "indices has shape (2, 5, 4, 3); it must be (batch, seqlen_q, heads_kv, topk) = (2, 5, 2, 3)"},
        Forward{"shape_packed", packed_forward, set(&F::indices, tensor(12, DType::i32, {4, 3})),
                "indices has shape (4, 3); it must be (total_q, topk) = (5, 3)"},
        Forward{"dtype", choosing, set(&F::indices, tensor(12, DType::f32, {2, 5, 3})),
                "indices is f32; convert it to i32 or i64"},
        Forward{"device", choosing,
                [](F& a) {
                  a.indices = on_gpu(tensor(12, DType::i32, {2, 5, 3}), 0);
                },
                "indices is on cuda:0 but q is on cpu; move it there"},
        Forward{"length_alone", dense_forward, set(&F::topk_length, tensor(13, DType::i32, {2, 5})),
                "topk_length is given without indices; pass both, or neither"},
        Forward{"length_shape", choosing, set(&F::topk_length, tensor(13, DType::i32, {2})),
                "topk_length has 1 dimensions; it must be (batch, seqlen_q)"},
        Forward{"length_dtype", choosing, set(&F::topk_length, tensor(13, DType::f32, {2, 5})),
                "topk_length is f32; convert it to i32 or i64"}),
    case_name<ForwardArgs>);

TEST(Indices, GoWithoutWhatHasNoMeaningForThem) {
  const auto refusal = [](auto change) {
    ForwardArgs a = choosing();
    a.q.dtype = a.k.dtype = a.v.dtype = a.out.dtype = DType::bf16;
    change(a);
    return error_of(Status::unsupported, [&] { make_problem(a); });
  };
  EXPECT_EQ(refusal([](F& a) { a.options.precision = Precision::fp8; }),
            "indices is given with an 8-bit precision, which does not take it; leave the precision exact, "
            "which takes k and v in 8 bits");
  EXPECT_EQ(
      refusal([](F& a) { a.options.split_size = 128; }),
      "indices is given with split_size, which does not take it; leave it out: a query's bits depend on "
      "nothing but its keys");
  EXPECT_EQ(refusal([](F& a) { a.options.dropout_p = 0.5F; }),
            "indices is given with dropout_p, which does not take it; leave it out");
  static const Function score = Function::parse("s", Function::Kind::score, {});
  EXPECT_EQ(refusal([](F& a) { a.score_function = &score; }),
            "indices is given with a score function, which does not take it; leave it out");
  static const Function mask = Function::parse("le(k, q)", Function::Kind::mask, {});
  EXPECT_EQ(
      refusal([](F& a) { a.mask_function = &mask; }),
      "indices is given with a mask function, which does not take it; leave out of indices what it hides");
}

}  // namespace
}  // namespace tandem::test
