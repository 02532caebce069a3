// The contract on errors: raised before anything is written; they state the rule, the value that broke it,
// and what to do.
#include <functional>
#include <limits>

#include "contract/contract.hpp"
#include "harness/error_of.hpp"

namespace tandem::harness {
namespace {

/// One broken rule, and what the message has to contain.
struct BrokenRule {
  const char* name;
  std::function<void(BackwardArgs&, ForwardArgs&)> break_it;
  std::vector<std::string> named;
};

/// The same change to what forward and backward share.
template <typename F>
std::function<void(BackwardArgs&, ForwardArgs&)> both(F change) {
  return [change](BackwardArgs& b, ForwardArgs& f) {
    change(static_cast<AttentionInputs&>(b), b.options);
    change(static_cast<AttentionInputs&>(f), f.options);
  };
}

const std::vector<BrokenRule>& broken_rules() {
  using In = AttentionInputs;
  using Options = AttentionOptions;
  static const std::vector<BrokenRule> rules{
      {"q missing", both([](In& in, Options&) { in.q = {}; }), {"q"}},
      {"rank", both([](In& in, Options&) { in.k.rank = 3; }), {"k", "3"}},
      {"head_dim of k", both([](In& in, Options&) { in.k.shape[3] = 32; }), {"k", "32", "64"}},
      {"rows of v", both([](In& in, Options&) { in.v.shape[1] = 138; }), {"v", "138", "139"}},
      {"batch of k", both([](In& in, Options&) { in.k.shape[0] = 1; }), {"k", "1", "2"}},
      {"head ratio", both([](In& in, Options&) { in.k.shape[2] = in.v.shape[2] = 3; }), {"heads", "3", "4"}},
      {"dtype of v", both([](In& in, Options&) { in.v.dtype = DType::f16; }), {"v", "f16", "bf16"}},
      {"integer q",
       both([](In& in, Options&) { in.q.dtype = in.k.dtype = in.v.dtype = DType::s8; }),
       {"q", "s8"}},
      {"last stride of q", both([](In& in, Options&) { in.q.stride[3] = 2; }), {"q", "2", "contiguous"}},
      {"null data", both([](In& in, Options&) { in.v.data = nullptr; }), {"v"}},
      {"misaligned",
       both([](In& in, Options&) { in.q.data = static_cast<const std::byte*>(in.q.data) + 1; }),
       {"q"}},
      {"scale NaN",
       both([](In&, Options& o) { o.scale = std::numeric_limits<float>::quiet_NaN(); }),
       {"scale", "nan"}},
      {"scale inf",
       both([](In&, Options& o) { o.scale = std::numeric_limits<float>::infinity(); }),
       {"scale", "inf"}},
      {"softcap negative", both([](In&, Options& o) { o.softcap = -1.5F; }), {"softcap", "-1.5"}},
      {"softcap NaN",
       both([](In&, Options& o) { o.softcap = std::numeric_limits<float>::quiet_NaN(); }),
       {"softcap"}},
      {"window_left", both([](In&, Options& o) { o.window_left = -2; }), {"window_left", "-2"}},
      {"window_right", both([](In&, Options& o) { o.window_right = -3; }), {"window_right", "-3"}},
      {"scale of bf16",
       both([](In& in, Options&) {
         static const float one = 1.0F;
         in.q_scale = ConstTensor(&one, DType::f32, {1});
       }),
       {"q_scale"}},
      {"sink shape",
       both([](In& in, Options&) {
         static const float sinks[3] = {};
         in.sink = ConstTensor(sinks, DType::f32, {3});
       }),
       {"sink", "3", "4"}},
      {"seqused dtype",
       both([](In& in, Options&) {
         static const float lengths[2] = {};
         in.seqused_k = ConstTensor(lengths, DType::f32, {2});
       }),
       {"seqused_k", "f32"}},
      {"seqused shape",
       both([](In& in, Options&) {
         static const std::int32_t lengths[5] = {};
         in.seqused_k = ConstTensor(lengths, DType::i32, {5});
       }),
       {"seqused_k", "5", "2"}},
      {"cu_seqlens with dense q",
       both([](In& in, Options&) {
         static const std::int32_t offsets[3] = {};
         in.cu_seqlens_q = ConstTensor(offsets, DType::i32, {3});
       }),
       {"q", "4"}},
      {"another device",
       both([](In& in, Options&) {
         in.k.device = {Device::Kind::cuda, 0};
       }),
       {"k", "cuda"}},
      {"negative size", both([](In& in, Options&) { in.q.shape[1] = -75; }), {"q", "-75"}},
  };
  return rules;
}

void expect_refused(Call& call, const BrokenRule& rule) {
  SCOPED_TRACE(rule.name);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    ForwardArgs forward_args = call.forward_args();
    BackwardArgs backward_args = call.backward_args();
    rule.break_it(backward_args, forward_args);
    call.prepare(pass);
    const std::string error = error_of(Status::invalid_argument, [&] {
      pass == Pass::forward ? tandem::forward(forward_args) : tandem::backward(backward_args);
    });
    for (const std::string& text : rule.named) {
      EXPECT_NE(error.find(text), std::string::npos) << error << "\nlacks " << text;
    }
    for (const Pass any : {Pass::forward, Pass::backward}) {
      for (const Box* box : call.outputs(any))
        EXPECT_FALSE(box->given() && box->changed()) << "something was written";
    }
  }
}

TEST(ContractErrors, BrokenRulesAreRefusedBeforeAnythingIsWritten) {
  Call call(plain_case(DType::bf16));
  for (const BrokenRule& rule : broken_rules()) expect_refused(call, rule);
}

TEST(ContractErrors, OutputsAreCheckedToo) {
  Call call(plain_case(DType::f32));
  const auto forward_throws = [&](const std::function<void(ForwardArgs&)>& change, const std::string& named) {
    ForwardArgs args = call.forward_args();
    change(args);
    call.prepare(Pass::forward);
    const std::string error = error_of(Status::invalid_argument, [&] { tandem::forward(args); });
    EXPECT_NE(error.find(named), std::string::npos) << error;
    EXPECT_FALSE(call.out.changed() || call.lse.changed());
  };
  forward_throws([](ForwardArgs& a) { a.out = {}; }, "out");
  forward_throws([](ForwardArgs& a) { a.out.shape[3] = 32; }, "out");
  forward_throws([](ForwardArgs& a) { a.out.dtype = DType::bf16; }, "out");
  forward_throws([](ForwardArgs& a) { a.out.stride[0] = 0; }, "out");
  forward_throws([](ForwardArgs& a) { a.lse.shape[1] = 3; }, "lse");
  forward_throws([](ForwardArgs& a) { a.lse.dtype = DType::f16; }, "lse");
  forward_throws([&](ForwardArgs& a) { a.out.data = const_cast<void*>(a.q.data); }, "out");
}

TEST(ContractErrors, BackwardOfEightBitIsAnErrorThatSaysWhatToDo) {
  Case c = plain_case(DType::e4m3);
  c.out_dtype = DType::bf16;
  Call call(c);
  const std::string error =
      error_of(Status::invalid_argument, [&] { tandem::backward(call.backward_args()); });
  EXPECT_NE(error.find("e4m3"), std::string::npos) << error;
  EXPECT_NE(error.find("16-bit"), std::string::npos) << error;
}

TEST(ContractErrors, ExplainAndWorkspaceBytesThrowWhatTheCallWouldThrow) {
  Call call(plain_case(DType::bf16));
  ForwardArgs args = call.forward_args();
  args.options.window_left = -2;
  EXPECT_THROW(static_cast<void>(explain(args)), Error);
  EXPECT_THROW(static_cast<void>(workspace_bytes(args)), Error);
  EXPECT_FALSE(explain(call.forward_args()).empty());
  EXPECT_FALSE(explain(call.backward_args()).empty());
}

}  // namespace
}  // namespace tandem::harness
