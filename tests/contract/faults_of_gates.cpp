// What a backend may get wrong of an output gate.
#include "contract/faulty_oracle.hpp"

namespace tandem::harness {
namespace {

/// As if dout were the gradient of O before the gate.
void gradients_of_the_gated_out(const Call& call, reference::Backward& b) {
  if (!call.gate.given()) return;
  Problem p = call.problem();
  p.gate = {};
  std::vector<double> dgate = std::move(b.dgate);
  b = reference::backward(p);
  b.dgate = std::move(dgate);
}

void unwritten_rows(Call& call) {
  const std::int64_t width = call.spec.heads_q * call.spec.head_dim_v;
  for_each_query_row(call.spec, [&](std::int64_t b, std::int64_t row, bool used) {
    const std::int64_t first = ((call.spec.packed_q ? 0 : b) * call.spec.rows_q() + row) * width;
    if (!used && call.gate.given()) call.out.set(first, call.gate.get(first));
  });
}

constexpr const char* masks = "Contract23_Gate.WithEveryMask";

const Fault all_faults[] = {
    {.name = "gate_left_out", .caught_by = masks, .problem = [](Problem& p) { p.gate = {}; }},
    {.name = "gate_of_the_first_head",
     .caught_by = masks,
     .problem = [](Problem& p) { p.gate.head_stride = 0; }},
    {.name = "gradients_of_the_gated_out", .caught_by = masks, .backward = gradients_of_the_gated_out},
    {.name = "dgate_one_percent_off",
     .caught_by = masks,
     .backward =
         [](const Call&, reference::Backward& b) {
           for (double& x : b.dgate) x *= 1.01;
         }},
    {.name = "gate_reaches_unused_rows",
     .caught_by = "Contract23_Gate.OfEveryLength",
     .after = unwritten_rows},
};

}  // namespace

std::span<const Fault> faults_of_gates() {
  return all_faults;
}

}  // namespace tandem::harness
