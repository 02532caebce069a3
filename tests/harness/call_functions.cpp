// The functions of a Call, the tensors that they read, and with these all that it reads.
#include "call.hpp"

namespace tandem::harness {

void Call::make_functions(Random& random) {
  std::vector<ConstTensor> views;
  for (const Captured& c : spec.captured) {
    Box& box = captured.emplace_back(c.dtype, c.shape, c.layout, false);
    const bool real = c.dtype == DType::f32 || c.dtype == DType::f16 || c.dtype == DType::bf16;
    for (std::int64_t n = 0; n < box.numel(); ++n) {
      const auto at = static_cast<std::size_t>(n);
      box.set(n, !c.values.empty() ? c.values[at]
                 : real            ? random.normal()
                                   : static_cast<double>(random.between(c.low, c.high)));
    }
    views.emplace_back(box.view());
  }
  if (!spec.score_function.empty()) {
    score_function = Function::parse(spec.score_function, Function::Kind::score, views, spec.differentiated);
  }
  if (!spec.differentiated.empty()) captured_gradients.resize(spec.captured.size());
  for (const int n : spec.differentiated) {
    const auto number = static_cast<std::size_t>(n);
    captured_gradients[number] = Box(DType::f32, spec.captured[number].shape, {}, true);
  }
  for (const Box& box : captured_gradients) captured_gradient_views.push_back(box.view());
  if (!spec.mask_function.empty()) {
    mask_function = Function::parse(spec.mask_function, Function::Kind::mask, views);
  }
}

std::vector<Box*> Call::outputs(Pass pass) {
  if (pass == Pass::forward) return {&out, &lse};
  std::vector<Box*> boxes{&dq, &dk, &dv, &dsink};
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
                          &dout,
                          &dlse};
  for (Box& box : captured) boxes.push_back(&box);
  return boxes;
}

}  // namespace tandem::harness
