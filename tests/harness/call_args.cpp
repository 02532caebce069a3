// A Call as the library takes it, and the tensors that it reads and writes.
#include "call.hpp"

namespace tandem::harness {
namespace {

void set_inputs(const Call& call, AttentionInputs& args) {
  args.q = call.q.view();
  args.k = call.k.view();
  args.v = call.v.view();
  args.cu_seqlens_q = call.cu_seqlens_q.view();
  args.cu_seqlens_k = call.cu_seqlens_k.view();
  args.seqused_q = call.seqused_q.view();
  args.seqused_k = call.seqused_k.view();
  args.page_table = call.page_table.view();
  args.leftpad_k = call.leftpad_k.view();
  args.cache_batch_idx = call.cache_batch_idx.view();
  args.causal_by_sequence = call.causal_by_sequence.view();
  args.sink = call.sink.view();
  args.q_scale = call.q_scale.view();
  args.k_scale = call.k_scale.view();
  args.v_scale = call.v_scale.view();
  args.score_function = call.score_of();
  args.mask_function = call.mask_of();
  args.dropout_places = call.dropout_places.view();
  args.indices = call.indices.view();
  args.topk_length = call.topk_length.view();
  args.gate = call.gate.view();
}

}  // namespace

ForwardArgs Call::forward_args() const {
  ForwardArgs args;
  set_inputs(*this, args);
  args.out = out.view();
  args.lse = lse.view();
  args.max_logits = max_logits.view();
  args.options = spec.options;
  return args;
}

BackwardArgs Call::backward_args() const {
  BackwardArgs args;
  set_inputs(*this, args);
  args.out = out.view();
  args.lse = lse.view();
  args.dout = dout.view();
  args.dlse = dlse.view();
  if (spec.options.backward_precision != Precision::exact) args.max_logits = max_logits.view();
  args.dq = dq.view();
  args.dk = dk.view();
  args.dv = dv.view();
  args.dsink = dsink.view();
  args.dgate = dgate.view();
  args.captured_gradients = captured_gradient_views;
  args.accumulate_dq = (spec.added & 1U) != 0;
  args.accumulate_dk_dv = (spec.added & 2U) != 0;
  args.options = spec.options;
  return args;
}

std::vector<Box*> Call::outputs(Pass pass) {
  if (pass == Pass::forward) return {&out, &lse, &max_logits};
  std::vector<Box*> boxes{&dq, &dk, &dv, &dsink, &dgate};
  for (Box& box : captured_gradients) boxes.push_back(&box);
  return boxes;
}

std::vector<Box*> Call::inputs() {
  std::vector<Box*> boxes{&q,
                          &k,
                          &v,
                          &sink,
                          &q_scale,
                          &k_scale,
                          &v_scale,
                          &cu_seqlens_q,
                          &cu_seqlens_k,
                          &seqused_q,
                          &seqused_k,
                          &page_table,
                          &leftpad_k,
                          &cache_batch_idx,
                          &causal_by_sequence,
                          &dropout_places,
                          &indices,
                          &topk_length,
                          &gate,
                          &dout,
                          &dlse};
  for (Box& box : captured) boxes.push_back(&box);
  return boxes;
}

bool Call::adds_to(const Box& box) const {
  if (&box == &dq) return box.given() && (spec.added & 1U) != 0;
  return (&box == &dk || &box == &dv) && box.given() && (spec.added & 2U) != 0;
}

}  // namespace tandem::harness
