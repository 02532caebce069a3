// What a backend may get wrong of gradients in 8 bits.
#include <cstddef>

#include "contract/faulty_oracle.hpp"
#include "harness/gradient_recipe.hpp"

namespace tandem::harness {
namespace {

/// Gradients in 8 bits of another call.
template <void (*change)(Call&)>
void in_8_bits_of(const Call& call, reference::Backward& b) {
  Call other = call;
  change(other);
  b = expected_backward(other, other.problem());
}
void without_dlse(Call& call) {
  call.dlse = Box{};
}
void window_one_wider(Call& call) {
  if (call.spec.options.window_left > 0) ++call.spec.options.window_left;
}
/// As if factors of rows were those of the rows beside them.
void max_logits_of_the_row_beside(Call& call) {
  const std::vector<double> values = call.max_logits.values();
  for (std::size_t n = 0; n + 1 < values.size(); ++n)
    call.max_logits.set(static_cast<std::int64_t>(n), values[n + 1]);
}
void gradients_in_16_bits(const Call& call, reference::Backward& b) {
  b = reference::backward(call.problem());
}
void nan_dropped_from_gradients(const Call&, reference::Backward& b) {
  for (auto* gradient : {&b.dq, &b.dk, &b.dv}) make_zero_if_nan(*gradient);
}
/// 0 times what a query that sees no key holds.
void gradients_of_unseen_queries(const Call& call, reference::Backward& b) {
  for (std::size_t n = 0; n < b.dq.size(); ++n) b.dq[n] += 0.0 * call.q.get(static_cast<std::int64_t>(n));
}
void gradients_depend_on_the_call(const Call&, reference::Backward& b) {
  static int calls = 0;
  if (!b.dk.empty()) b.dk[0] *= 1.0 + 0.01 * (++calls % 2);
}

constexpr const char* every_mask = "ContractAccuracy_GradientsIn8Bits.WithEveryMask";
constexpr const char* rows_in_use = "Contract05_GradientsIn8Bits.OfRowsInUse";

const Fault all_faults[] = {
    {.name = "gradients_in_16_bits", .caught_by = rows_in_use, .backward = gradients_in_16_bits},
    {.name = "dlse_left_out_in_8_bits", .caught_by = rows_in_use, .backward = in_8_bits_of<without_dlse>},
    {.name = "max_logits_of_the_row_beside",
     .caught_by = rows_in_use,
     .backward = in_8_bits_of<max_logits_of_the_row_beside>},
    {.name = "window_one_wider_in_8_bits",
     .caught_by = every_mask,
     .backward = in_8_bits_of<window_one_wider>},
    {.name = "nan_dropped_from_gradients_in_8_bits",
     .caught_by = "Contract07_GradientsIn8Bits.NaNReachesThePairsThatHaveIt",
     .backward = nan_dropped_from_gradients},
    {.name = "gradients_in_8_bits_of_unseen_queries",
     .caught_by = "Contract02_GradientsIn8Bits.QueriesThatSeeNoKeyHaveNone",
     .backward = gradients_of_unseen_queries},
    {.name = "gradients_in_8_bits_depend_on_the_call",
     .caught_by = "Contract15_GradientsIn8Bits.InAFixedOrderHaveTheSameBits",
     .backward = gradients_depend_on_the_call},
};

}  // namespace

std::span<const Fault> faults_in_8_bits() {
  return all_faults;
}

reference::Backward expected_backward(const Call& call, const Problem& problem) {
  if (call.spec.options.backward_precision == Precision::exact) return reference::backward(problem);
  const GradientsExpected e = expect_gradients_in_8_bits(call);
  reference::Backward b;
  b.dq = e.dq.values;
  b.dk = e.dk.values;
  b.dv = e.dv.values;
  return b;
}

}  // namespace tandem::harness
