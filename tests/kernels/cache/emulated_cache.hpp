// The kernels of append_kv and merge in the emulator, as a backend of the contract's tests.
#pragma once

#include <cstdint>

#include "harness/runner.hpp"
#include "problem/append_problem.hpp"
#include "problem/merge_problem.hpp"

namespace tandem::emulator {
struct Options;
}

namespace tandem::kernel_tests {

class EmulatedCache : public harness::Runner {
 public:
  /// `blocks`: those of an append's launch; 0: as many as of a device of one multiprocessor.
  explicit EmulatedCache(unsigned blocks = 0) : blocks_(blocks) {}
  [[nodiscard]] std::string name() const override { return "emulated"; }
  [[nodiscard]] std::string refuses(const harness::Case&) const override { return "caches alone"; }
  [[nodiscard]] std::string refuses_append(const harness::AppendCase& c) const override;
  [[nodiscard]] std::string refuses_merge(const harness::MergeCase& c) const override;
  void forward(harness::Call&) override {}
  void backward(harness::Call&) override {}
  void append(harness::AppendCall& call) override;
  void merge(harness::MergeCall& call) override;

 private:
  unsigned blocks_;
};

/// Runs the kernels that the plan chooses, on memory that `options` names.
void emulate_append(const AppendProblem& problem, const emulator::Options& options, unsigned blocks = 0);
void emulate_merge(const MergeProblem& problem, const emulator::Options& options);

}  // namespace tandem::kernel_tests
