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
  p.out = builder.like_q(out, p.head_dim_v, like_out, true);
  p.lse = builder.row_statistics(lse);
  builder.outputs({out, lse}, {});
  builder.contents();
  return p;
}

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
  const check::Argument dq{"dq", args.dq};
  const check::Argument dk{"dk", args.dk};
  const check::Argument dv{"dv", args.dv};
  const check::Argument dsink{"dsink", args.dsink};
  p.out = builder.like_q(out, p.head_dim_v, like_out);
  check::given(lse, "(batch, heads_q, seqlen_q), or (heads_q, total_q) with cu_seqlens_q");
  p.lse = builder.row_statistics(lse);
  p.dout = builder.like_q(dout, p.head_dim_v, like_out);
  p.dlse = builder.row_statistics(dlse);
  p.captured_gradients = args.captured_gradients;
  if (!dq.given() && !dk.given() && !dv.given() && !dsink.given() && !p.wants_captured_gradients()) {
    check::invalid("dq, dk, dv and dsink are all missing; pass those that are wanted");
  }
  for (const check::Argument& a : {dq, dk, dv}) check::consistent(a);
  if (dq.given()) p.dq = builder.like_q(dq, p.head_dim_qk, like_query, true);
  if (dk.given()) p.dk = builder.like_k(dk, p.head_dim_qk, like_key, true);
  if (dv.given()) p.dv = builder.like_k(dv, p.head_dim_v, like_value, true);
  const check::Argument& first = dq.given() ? dq : dk.given() ? dk : dv;
  for (const check::Argument& a : {dk, dv}) {
    if (a.given()) check::same_dtype(a, first);
  }
  p.gradient_dtype = first.given() ? first.tensor.dtype : p.q.dtype;
  builder.by_head(dsink);
  if (dsink.given() && !args.sink.given())
    check::invalid("dsink is given without sink; pass both, or neither");
  p.dsink = static_cast<float*>(address_of(args.dsink));
  p.dsink_stride = stride_of(args.dsink, 0);
  builder.outputs({dq, dk, dv, dsink}, {out, lse, dout, dlse});
  builder.captured_gradients({dq, dk, dv, dsink, out, lse, dout, dlse});
  builder.contents();
  return p;
}

}  // namespace tandem
