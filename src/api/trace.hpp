// A call as its observers see it: a range in a profiler's timeline, a line in the log.
#pragma once

#include <string>

#include "problem/append_problem.hpp"
#include "problem/merge_problem.hpp"
#include "problem/problem.hpp"
#include "problem/quantize_problem.hpp"

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

/// Stands for a running call, from its launch to its return. Costs two loads where nobody looks.
class Trace {
 public:
  /// Begins the trace of any problem that has a summary.
  template <typename AnyProblem>
  explicit Trace(const AnyProblem& problem) : range_(ranges_are_watched()) {
    if (range_ || is_logged()) begin(summary(problem));
  }
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

 private:
  static bool ranges_are_watched();
  static bool is_logged();
  void begin(const std::string& text) const;

  bool range_ = false;
};

}  // namespace tandem
