// A runner that is right but for one fault: what the suite has to notice.
#pragma once

#include <span>
#include <vector>

#include "cpu/reference/reference.hpp"
#include "harness/runner.hpp"

namespace tandem::harness {

/// What is wrong with a FaultyOracle; each part may be missing.
struct Fault {
  const char* name;
  /// A test of the contract that has to fail: SUITE.NAME.
  const char* caught_by;
  /// Another problem is solved than the one that was asked for.
  void (*problem)(Problem&) = nullptr;
  /// The oracle's results are changed before they are written.
  void (*forward)(const Call&, reference::Forward&) = nullptr;
  void (*backward)(const Call&, reference::Backward&) = nullptr;
  /// Memory is touched when the results of a forward pass have been written.
  void (*after)(Call&) = nullptr;
};

/// One fault for each thing that a backend may get wrong.
std::span<const Fault> faults();

/// What a fault that drops a NaN does to results.
void make_zero_if_nan(std::vector<double>& values);

/// And of gradients in 8 bits.
std::span<const Fault> faults_in_8_bits();
/// And of output gates.
std::span<const Fault> faults_of_gates();

/// The oracle's gradients of a problem; in 8 bits those of the call, by their recipe.
reference::Backward expected_backward(const Call& call, const Problem& problem);

/// Writes the oracle's results, rounded to the outputs' dtypes, as a backend without rounding errors of its
/// own would; with a fault's changes.
class FaultyOracle : public Runner {
 public:
  explicit FaultyOracle(const Fault& fault) : fault_(fault) {}
  [[nodiscard]] std::string name() const override { return std::string("oracle, ") + fault_.name; }
  [[nodiscard]] std::string refuses_max_logits(const Case&) const override { return {}; }
  void forward(Call& call) override;
  void backward(Call& call) override;

 private:
  const Fault fault_;
};

}  // namespace tandem::harness
