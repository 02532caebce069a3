#include "expect.hpp"

#include <fmt/format.h>

#include <cmath>

namespace tandem::harness {
namespace {

std::string at(const Box& box, std::int64_t index) {
  std::string text;
  for (int dim = box.view().rank; dim-- > 0;) {
    const std::int64_t size = box.view().shape[static_cast<std::size_t>(dim)];
    text = fmt::format("{}{}{}", index % size, text.empty() ? "" : ", ", text);
    index /= size;
  }
  return text;
}

}  // namespace

Expected expect(const Call& call, Pass pass) {
  // With an out in f32 as well, products are those of the inputs' dtype.
  return expect(call.problem(), call.spec.f32_out ? call.spec.dtype : call.spec.result_dtype(), pass);
}

testing::AssertionResult matches(const char* name, const Box& box, const Target& target) {
  if (!box.given()) return testing::AssertionSuccess();
  if (static_cast<std::size_t>(box.numel()) != target.values.size()) {
    return testing::AssertionFailure()
           << name << " has " << box.numel() << " elements, the oracle " << target.values.size();
  }
  const std::vector<double> got = box.values();
  const Deviation d = compare(target, [&got](std::int64_t n) { return got[static_cast<std::size_t>(n)]; });
  if (d.right()) return testing::AssertionSuccess();
  std::string worst;
  if (d.worst >= 0) {
    const double expected = target.values[static_cast<std::size_t>(d.worst)];
    worst = fmt::format("; the worst is [{}]: got {:.9g}, expected {:.9g}, error {:.3g}, allowed {:.3g}",
                        at(box, d.worst), box.get(d.worst), expected, std::abs(box.get(d.worst) - expected),
                        target.bound.at(expected));
  }
  return testing::AssertionFailure() << fmt::format("{}: of {} elements, {}{}", name, box.numel(),
                                                    d.complaint(), worst);
}

testing::AssertionResult correct(Call& call, Pass pass, const Expected& e) {
  using Check = std::tuple<const char*, const Box*, const Target*>;
  std::vector<Check> checks;
  if (pass == Pass::forward) {
    checks = {Check{"out", &call.out, &e.out}, Check{"lse", &call.lse, &e.lse},
              Check{"max_logits", &call.max_logits, &e.max_logits}};
  } else {
    checks = {Check{"dq", &call.dq, &e.dq}, Check{"dk", &call.dk, &e.dk}, Check{"dv", &call.dv, &e.dv},
              Check{"dsink", &call.dsink, &e.dsink}, Check{"dgate", &call.dgate, &e.dgate}};
    for (std::size_t n = 0; n < e.captured.size(); ++n) {
      checks.emplace_back("a captured tensor's gradient", &call.captured_gradients[n], &e.captured[n]);
    }
  }
  for (const auto& [name, box, target] : checks) {
    if (!box->given() && box != &call.dsink) continue;  // not asked for
    Target sum = *target;
    for (std::size_t n = 0; call.adds_to(*box) && n < sum.values.size(); ++n)
      sum.values[n] += Call::before(static_cast<std::int64_t>(n));
    if (testing::AssertionResult result = matches(name, *box, sum); !result) return result;
    if (!box->given()) continue;
    if (const std::string where = box->changed_outside(); !where.empty()) {
      return testing::AssertionFailure() << name << ": " << where;
    }
  }
  for (const Box* input : call.inputs()) {
    if (input->given() && input->changed()) return testing::AssertionFailure() << "an input was written";
  }
  return testing::AssertionSuccess();
}

}  // namespace tandem::harness
