#include "api/make_problem.hpp"

#include "api/problem_builder.hpp"

namespace tandem {

Problem make_problem(const ForwardArgs& args, Memory memory) {
  ProblemBuilder builder(args, args.options, Pass::forward, memory);
  builder.sizes();
  builder.inputs();
  builder.options();
  builder.functions();
  Problem& p = builder.problem();
  const check::Argument out{"out", args.out};
  const check::Argument lse{"lse", args.lse};
  const check::Argument max_logits{"max_logits", args.max_logits};
  p.out = builder.like_q(out, p.head_dim_v, like_out, true);
  p.lse = builder.row_statistics(lse);
  p.max_logits = builder.row_statistics(max_logits);
  builder.outputs({out, lse, max_logits}, {});
  builder.contents();
  return p;
}

namespace {

constexpr const char* of_row_statistics =
    "(batch, heads_q, seqlen_q), or (heads_q, total_q) with cu_seqlens_q";

/// Whether a gradient is added to.
bool adds(const char* option, bool asked, const check::Argument& gradient) {
  if (!asked || !gradient.given()) return false;
  if (gradient.tensor.dtype != DType::f32) {
    check::invalid("{} adds in f32, but {} is {}; pass it in f32, or leave {} out", option, gradient.name,
                   name_of(gradient.tensor.dtype), option);
  }
  return true;
}

/// They scale rows of a backward pass in 8 bits, and no other reads them.
void check_max_logits(const check::Argument& max_logits, Precision backward_precision) {
  if (backward_precision != Precision::exact) return check::given(max_logits, of_row_statistics);
  if (!max_logits.given()) return;
  check::invalid("max_logits is given, but backward_precision is exact and does not read it; leave it out");
}

}  // namespace

Problem make_problem(const BackwardArgs& args, Memory memory) {
  ProblemBuilder builder(args, args.options, Pass::backward, memory);
  builder.sizes();
  builder.inputs();
  builder.options();
  builder.functions();
  Problem& p = builder.problem();
  const check::Argument out{"out", args.out};
  const check::Argument lse{"lse", args.lse};
  const check::Argument dout{"dout", args.dout};
  const check::Argument dlse{"dlse", args.dlse};
  const check::Argument max_logits{"max_logits", args.max_logits};
  const check::Argument dq{"dq", args.dq};
  const check::Argument dk{"dk", args.dk};
  const check::Argument dv{"dv", args.dv};
  const check::Argument dsink{"dsink", args.dsink};
  const check::Argument dgate{"dgate", args.dgate};
  p.out = builder.like_q(out, p.head_dim_v, like_out);
  check::given(lse, of_row_statistics);
  p.lse = builder.row_statistics(lse);
  p.dout = builder.like_q(dout, p.head_dim_v, like_out);
  p.dlse = builder.row_statistics(dlse);
  check_max_logits(max_logits, p.backward_precision);
  p.max_logits = builder.row_statistics(max_logits);
  p.captured_gradients = args.captured_gradients;
  if (!dq.given() && !dk.given() && !dv.given() && !dsink.given() && !dgate.given() &&
      !p.wants_captured_gradients()) {
    check::invalid("dq, dk, dv, dsink and dgate are all missing; pass those that are wanted");
  }
  for (const check::Argument& a : {dq, dk, dv, dgate}) check::consistent(a);
  if (dq.given()) p.dq = builder.like_q(dq, p.head_dim_qk, like_query, true);
  if (dk.given()) p.dk = builder.like_k(dk, p.head_dim_qk, like_key, true);
  if (dv.given()) p.dv = builder.like_k(dv, p.head_dim_v, like_value, true);
  if (dk.given() && dv.given()) check::same_dtype(dv, dk);
  p.f32_dq = dq.given() && dq.tensor.dtype == DType::f32;
  p.f32_dk_dv = (dk.given() ? dk : dv).given() && (dk.given() ? dk : dv).tensor.dtype == DType::f32;
  p.adds_dq = adds("accumulate_dq", args.accumulate_dq, dq);
  const bool adds_dk = adds("accumulate_dk_dv", args.accumulate_dk_dv, dk);
  p.adds_dk_dv = adds("accumulate_dk_dv", args.accumulate_dk_dv, dv) || adds_dk;
  builder.by_head(dsink);
  if (dsink.given() && !args.sink.given())
    check::invalid("dsink is given without sink; pass both, or neither");
  p.dsink = static_cast<float*>(address_of(args.dsink));
  p.dsink_stride = stride_of(args.dsink, 0);
  if (dgate.given() && !p.gate.given()) check::invalid("dgate is given without gate; pass both, or neither");
  if (dgate.given()) p.dgate = builder.like_q(dgate, p.head_dim_v, like_out);
  builder.outputs({dq, dk, dv, dsink, dgate}, {out, lse, dout, dlse, max_logits});
  builder.captured_gradients({dq, dk, dv, dsink, dgate, out, lse, dout, dlse, max_logits});
  builder.contents();
  return p;
}

}  // namespace tandem
