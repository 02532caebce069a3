// A call as its observers see it: counters, a range in a profiler's timeline, a line in the log.
#pragma once

#include <string>

#include "ops/plan.hpp"
#include "problem/append_problem.hpp"
#include "problem/merge_problem.hpp"
#include "problem/problem.hpp"
#include "problem/quantize_problem.hpp"
#include "problem/stats.hpp"

namespace tandem {

/// The inputs' dtypes: that of all, or "bf16 on e4m3" where k and v have another than q.
std::string dtypes(const Problem& problem);

/// The problem in a line: "forward bf16 b2 q300 k300 h4/4 d128/128 causal".
std::string summary(const Problem& problem);

/// A call to quantize in a line: "quantize bf16 to e4m3 b2 n300 h4 d128 block hadamard mean".
std::string summary(const QuantizeProblem& problem);

/// "append bf16 to e4m3 b8 n1 h8 d128/128 paged rotary".
std::string summary(const AppendProblem& problem);

/// "merge f32 to bf16 parts 4 b2 n1 h32 d128".
std::string summary(const MergeProblem& problem);

/// What a call is counted as, and what it amounts to. Lengths that only tensors hold are not read: a cache
/// counts as full.
CallKind kind_of(const Plan& plan);
CallKind kind_of(const QuantizeProblem& problem);
CallKind kind_of(const AppendProblem& problem);
CallKind kind_of(const MergeProblem& problem);
CallWork work_of(const Problem& problem);
CallWork work_of(const QuantizeProblem& problem);
CallWork work_of(const AppendProblem& problem);
CallWork work_of(const MergeProblem& problem);

/// Stands for a running call, from its launch to its return. Costs two loads and the counters where nobody
/// looks.
class Trace {
 public:
  Trace(const Problem& problem, const Plan& plan) : Trace(problem, kind_of(plan)) {
    work_.workspace_bytes = plan.workspace_bytes;
  }
  template <typename AnyProblem>
  explicit Trace(const AnyProblem& problem) : Trace(problem, kind_of(problem)) {}
  ~Trace();
  /// What explain says, which `text()` is asked for where the call is sampled.
  template <typename Text>
  void add_plan(Text&& text) {
    if (!sampled_) return;
    plan_ = text();
    start_ = ticks();  // the call's time is without it
  }
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

 private:
  /// Begins the trace of any problem that has a summary.
  template <typename AnyProblem>
  Trace(const AnyProblem& problem, const CallKind& kind)
      : kind_(kind), work_(work_of(problem)), range_(ranges_are_watched()) {
    if (range_ || sampled_ || is_logged()) begin(summary(problem));
  }
  static bool ranges_are_watched();
  static bool is_logged();
  void begin(std::string text);

  CallKind kind_;
  CallWork work_;
  std::uint64_t start_ = ticks();
  bool range_ = false;
  bool sampled_ = is_sampled();
  std::string summary_, plan_;  ///< given where the call is sampled
};

}  // namespace tandem
