// Backends as the tests see them. A new backend is one registration.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "call.hpp"

namespace tandem::harness {

/// A way to run a Call. Tensors are host memory between guard pages; a runner for a device copies the boxes'
/// bytes there and back, so that it works on the same strides.
class Runner {
 public:
  virtual ~Runner() = default;
  [[nodiscard]] virtual std::string name() const = 0;
  /// Why this runner cannot run a case; empty if it can.
  [[nodiscard]] virtual std::string refuses(const Case&) const { return {}; }
  /// Writes call.out and call.lse, or the gradients from them.
  virtual void forward(Call& call) = 0;
  virtual void backward(Call& call) = 0;
};

/// All runners of this machine; the CPU ones are there from the start: one a Target of the processor.
std::vector<Runner*> runners();
/// Adds a runner for the rest of the process; register before the tests run.
void add_runner(Runner& runner);
/// Makes it the only one: the tests' lines are then about this backend alone.
void use_only(Runner& runner);

/// Runs f on every runner that accepts the case, under a trace of its name and the case.
void on_every_runner(const Case& spec, const std::function<void(Runner&)>& f);

/// Forward, and backward where there is one, on every runner, against the oracle.
void run_everywhere(const Case& spec);
/// The same for a prepared call, whose inputs a test has changed by hand.
void run_everywhere(Call& call, bool backward = true);

}  // namespace tandem::harness
