// A call as its observers see it: a range in a profiler's timeline, a line in the log.
#pragma once

#include <string>

#include "problem/problem.hpp"
#include "problem/quantize_job.hpp"

namespace tandem {

/// The inputs' dtypes: that of all, or "bf16 on e4m3" where k and v have another than q.
std::string dtypes(const Problem& problem);

/// The problem in a line: "forward bf16 b2 q300 k300 h4/4 d128/128 causal".
std::string summary(const Problem& problem);

/// The same of quantize: "quantize bf16 to e4m3 b2 n300 h4 d128 block hadamard mean".
std::string summary(const QuantizeJob& job);

/// Stands for a running call, from its launch to its return. Costs two loads where nobody looks.
class Trace {
 public:
  explicit Trace(const Problem& problem);
  explicit Trace(const QuantizeJob& job);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

 private:
  void begin(const std::string& text) const;

  bool range_ = false;
};

}  // namespace tandem
