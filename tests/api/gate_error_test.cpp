// Every way in which the output gate of a call can be wrong, and the whole message.
#include <gtest/gtest.h>

#include "error_case.hpp"

namespace tandem::test {
namespace {

using F = ForwardArgs;
using B = BackwardArgs;
ForwardArgs gated_forward() {
  ForwardArgs a = dense_forward();
  a.gate = tensor(13, DType::f32, {2, 5, 4, 8});
  return a;
}
BackwardArgs gated_backward() {
  BackwardArgs a = dense_backward();
  a.gate = tensor(13, DType::f32, {2, 5, 4, 8});
  a.dgate = tensor(14, DType::f32, {2, 5, 4, 8});
  return a;
}

using Forward = Case<ForwardArgs>;
class GateError : public testing::TestWithParam<Forward> {};
TEST_P(GateError, SaysRuleValueAndRemedy) {
  expect_message(GetParam());
}
INSTANTIATE_TEST_SUITE_P(
    Of, GateError,
    testing::Values(
        Forward{"gate_shape", gated_forward, set(&F::gate, tensor(13, DType::f32, {2, 5, 4, 16})),
                "gate has shape (2, 5, 4, 16); it must be (batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, "
                "8)"},
        Forward{"gate_dtype", gated_forward, [](F& a) { a.gate.dtype = DType::bf16; },
                "gate is bf16 but q is f32; convert it to f32"},
        Forward{"gate_is_out", gated_forward, [](F& a) { a.gate.data = a.out.data; },
                "out shares memory with gate; an output needs memory of its own"}),
    case_name<ForwardArgs>);

using Backward = Case<BackwardArgs>;
class GateGradientError : public testing::TestWithParam<Backward> {};
TEST_P(GateGradientError, SaysRuleValueAndRemedy) {
  expect_message(GetParam());
}
INSTANTIATE_TEST_SUITE_P(
    Of, GateGradientError,
    testing::Values(
        Backward{"dgate_without_gate", gated_backward, [](B& a) { a.gate = {}; },
                 "dgate is given without gate; pass both, or neither"},
        Backward{
            "dgate_shape", gated_backward, set(&B::dgate, tensor(14, DType::f32, {2, 5, 2, 8})),
            "dgate has shape (2, 5, 2, 8); it must be (batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, "
            "8)"},
        Backward{"dgate_dtype", gated_backward, [](B& a) { a.dgate.dtype = DType::f16; },
                 "dgate is f16 but q is f32; convert it to f32"},
        Backward{"dgate_is_gate", gated_backward, [](B& a) { a.dgate.data = const_cast<void*>(a.gate.data); },
                 "dgate shares memory with gate; an output needs memory of its own"}),
    case_name<BackwardArgs>);

TEST(Gate, MayBeTheOnlyOneWithAGradient) {
  BackwardArgs a = gated_backward();
  a.dq = a.dk = a.dv = a.dsink = {};
  EXPECT_NO_THROW(make_problem(a));
}

TEST(Gate, HasNoCallsOfEightBits) {
  const auto refusal = [](const ForwardArgs& a) {
    return error_of(Status::unsupported, [&] { make_problem(a); });
  };
  ForwardArgs a = e4m3_forward();
  a.gate = tensor(13, DType::bf16, {2, 5, 4, 8});
  EXPECT_EQ(refusal(a), "gate is given with q in e4m3, whose calls have none; multiply out by its sigmoid");
  a = dense_forward();
  a.q.dtype = a.k.dtype = a.v.dtype = a.out.dtype = DType::bf16;
  a.gate = tensor(13, DType::bf16, {2, 5, 4, 8});
  a.options.precision = Precision::int8;
  EXPECT_NO_THROW(make_problem(a));
  a.options.backward_precision = Precision::int8;
  EXPECT_EQ(refusal(a),
            "gate is given with backward_precision int8, whose gradients have none; leave one of both out");
}

}  // namespace
}  // namespace tandem::test
