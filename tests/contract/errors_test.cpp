// The contract on errors: raised before anything is written. Every rule and its message is in tests/api.
#include <initializer_list>

#include "contract/contract.hpp"

namespace tandem::harness {
namespace {

void expect_nothing_written(Call& call) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const Box* box : call.outputs(pass)) EXPECT_FALSE(box->given() && box->changed());
  }
}

using Break = void (*)(AttentionInputs&, AttentionOptions&);

TEST(ContractErrors, BrokenRulesAreRefusedBeforeAnythingIsWritten) {
  for (const Break change : std::initializer_list<Break>{
           [](AttentionInputs&in, AttentionOptions&) { in.v.shape[1] = 138; },
           [](AttentionInputs&in, AttentionOptions&) { in.q.stride[3] = 2; },
           [](AttentionInputs&in, AttentionOptions&) {
             in.k.device = {Device::Kind::cuda, 0};
           },
           [](AttentionInputs&in, AttentionOptions&) {
             static const float lengths[2] = {};
             in.seqused_k = ConstTensor(lengths, DType::f32, {2});
           },
           [](AttentionInputs&, AttentionOptions&options) { options.window_left = -2; },
           [](AttentionInputs&, AttentionOptions&options) {
             options.precision = options.backward_precision = Precision::int8;
             options.softcap = 1.5F;
           },
           [](AttentionInputs&in, AttentionOptions&options) {
             static const float sinks[4] = {};
             in.sink = ConstTensor(sinks, DType::f32, {4});
             options.precision = options.backward_precision = Precision::int8;
           }}) {
    Call call(plain_case(DType::bf16));
    ForwardArgs forward_args = call.forward_args();
    change(forward_args, forward_args.options);
    call.prepare(Pass::forward);
    EXPECT_THROW(tandem::forward(forward_args), Error);
    expect_nothing_written(call);
    BackwardArgs backward_args = call.backward_args();
    change(backward_args, backward_args.options);
    call.prepare(Pass::backward);
    EXPECT_THROW(tandem::backward(backward_args), Error);
    expect_nothing_written(call);
  }
}

TEST(ContractErrors, OutputsAreCheckedToo) {
  Call call(plain_case(DType::f32));
  for (const bool of_out : {true, false}) {
    ForwardArgs args = call.forward_args();
    (of_out ? args.out : args.lse).stride[0] = 0;
    call.prepare(Pass::forward);
    EXPECT_THROW(tandem::forward(args), Error);
    expect_nothing_written(call);
  }
}

}  // namespace
}  // namespace tandem::harness
