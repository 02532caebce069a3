// Results against the fp64 oracle, by the contract's accuracy rule.
#pragma once

#include <string>
#include <vector>

#include "call.hpp"
#include "harness/accuracy.hpp"
#include "report.hpp"

namespace tandem::cli {

struct Verdict {
  std::string output;
  harness::Bound bound;
  harness::Deviation deviation;
  std::int64_t elements = 0;
  [[nodiscard]] bool right() const { return deviation.right(); }
};
/// Each output of a pass that is there, against what it should hold.
std::vector<Verdict> compare_outputs(const TensorSet& outputs, const harness::Expected& expected, Pass pass);

/// Poisons all outputs with NaN, runs the call and compares each output with the oracle. `forward_seconds`
/// and `backward_seconds` are what the passes took.
struct Verification {
  std::vector<Verdict> verdicts;
  double forward_seconds = 0.0;
  double backward_seconds = 0.0;
  [[nodiscard]] bool right() const;
};
Verification verify(Call& call);

/// "1e-05 relative" or "0.00123".
std::string describe(const harness::Bound& bound);
/// "gain 0.9998, RMS 1.2e-04 of 3.1e-04": the figures of the whole tensor. Empty where it has no such bounds.
std::string describe_whole(const Verdict& verdict);
Json to_json(const Verdict& verdict);

}  // namespace tandem::cli
