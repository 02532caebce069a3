// The functions and dropout of a Call, and the tensors that they read.
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
  if (spec.dropout_places.empty()) return;
  dropout_places = Box(DType::i32, {spec.batch, 4}, {}, false);
  for (std::int64_t n = 0; n < dropout_places.numel(); ++n) {
    dropout_places.set(n, static_cast<double>(spec.dropout_places[static_cast<std::size_t>(n)]));
  }
}

Dropout Call::dropout() const {
  Dropout d = make_dropout(spec.options.dropout_p, spec.options.dropout_seed, spec.options.dropout_offset,
                           spec.heads_q);
  if (!dropout_places.given()) return d;
  d.places = static_cast<const std::int32_t*>(dropout_places.view().data);
  d.place_stride = 4;
  return d;
}

}  // namespace tandem::harness
