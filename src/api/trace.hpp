// A call as its observers see it: a range in a profiler's timeline, a line in the log.
#pragma once

#include <string>

#include "api/problem.hpp"

namespace tandem {

/// The inputs' dtypes: that of all, or "bf16 on e4m3" where k and v have another than q.
std::string dtypes(const Problem& problem);

/// The problem in a line: "forward bf16 b2 q300 k300 h4/4 d128/128 causal".
std::string summary(const Problem& problem);

/// Stands for a running call, from its launch to its return. Costs two loads where nobody looks.
class Trace {
 public:
  explicit Trace(const Problem& problem);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

 private:
  bool range_ = false;
};

}  // namespace tandem
