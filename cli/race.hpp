// Kernels that compute the same thing, against each other on the GPU: compiled, checked against the first,
// timed in rounds of all of them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "gpu/compiler.hpp"
#include "gpu/device.hpp"
#include "supervise.hpp"
#include "tandem/tensor.hpp"

namespace tandem::cli {

/// A result that every kernel writes anew.
struct RaceOutput {
  std::string name;
  gpu::DeviceBuffer buffer;
  DType dtype;
  double tolerance;  ///< a difference from the first kernel's, as a share of that one's largest magnitude
};

/// One problem in GPU memory, and the kernels that solve it. Item i of the reports is kernels[i].
struct RaceCourse {
  std::vector<gpu::KernelName> kernels;
  std::function<void(std::size_t)> launch;  ///< one call, into the default stream
  std::vector<RaceOutput> outputs;
  double flops = 0.0;  ///< operations of a call
};

struct RaceRules {
  int rounds = 7;
  double burst_ms = 6.0;   ///< what a kernel runs for in a round
  unsigned compilers = 1;  ///< threads that compile
};

/// A supervised worker. Facts of a kernel: registers, stack_bytes, spill_bytes, serialised, max_difference
/// (the largest share of a tolerance), us and tflops (medians over the rounds). A kernel that does not
/// compile, writes something else or leaves something unwritten is a failure. Throws Error if the first one
/// fails: there is nothing to compare with then.
bool race(RaceCourse& course, const RaceRules& rules, const std::vector<ItemReport>& reports,
          const Reporter& reporter);

}  // namespace tandem::cli
