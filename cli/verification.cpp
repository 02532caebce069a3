#include "verification.hpp"
#include "api/make_problem.hpp"

#include <algorithm>

#include "cpu/convert.hpp"

namespace tandem::cli {
namespace {

void check_pass(const TensorSet& outputs, const harness::Expected& expected, Pass pass,
                std::vector<Verdict>& verdicts) {
  struct Named {
    const char* name;
    const harness::Target* target;
  };
  const std::vector<Named> targets =
      pass == Pass::forward
          ? std::vector<Named>{{"out", &expected.out}, {"lse", &expected.lse}}
          : std::vector<Named>{
                {"dq", &expected.dq}, {"dk", &expected.dk}, {"dv", &expected.dv}, {"dsink", &expected.dsink}};
  for (const auto& [name, target] : targets) {
    const auto found = outputs.find(name);
    if (found == outputs.end()) continue;
    const files::TensorData& tensor = found->second;
    if (static_cast<std::size_t>(tensor.numel()) != target->values.size()) {
      throw Error(Status::internal, fmt::format("{} has {} elements, the oracle {}; please report this", name,
                                                tensor.numel(), target->values.size()));
    }
    Verdict verdict;
    verdict.output = name;
    verdict.bound = target->bound;
    verdict.elements = tensor.numel();
    verdict.deviation = harness::compare(*target, [&tensor](std::int64_t n) {
      return static_cast<double>(load_as_f32(tensor.bytes().data(), tensor.dtype(), n));
    });
    verdicts.push_back(verdict);
  }
}

}  // namespace

bool Verification::right() const {
  return std::ranges::all_of(verdicts, &Verdict::right);
}

Verification verify(Call& call) {
  call.poison_outputs();
  Verification result;
  result.forward_seconds = call.run_forward();
  const DType dtype = call.forward_args().out.dtype;
  check_pass(call.fetch_outputs(), harness::expect(make_problem(call.forward_args()), dtype, Pass::forward),
             Pass::forward, result.verdicts);
  if (call.has_backward()) {
    result.backward_seconds = call.run_backward();
    check_pass(call.fetch_outputs(),
               harness::expect(make_problem(call.backward_args()), dtype, Pass::backward), Pass::backward,
               result.verdicts);
  }
  return result;
}

std::string describe(const harness::Bound& bound) {
  return bound.relative > 0 ? fmt::format("{:.1e} relative", bound.relative)
                            : fmt::format("{:.2e}", bound.absolute);
}

Json to_json(const Verdict& v) {
  return {{"output", v.output},
          {"right", v.right()},
          {"elements", v.elements},
          {"wrong", v.deviation.wrong},
          {"largest_error", v.deviation.largest},
          {"bound_absolute", v.bound.absolute},
          {"bound_relative", v.bound.relative},
          {"share_of_bound", v.deviation.share},
          {"worst_element", v.deviation.worst}};
}

}  // namespace tandem::cli
