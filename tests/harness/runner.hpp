// Backends as the tests see them. A new backend is one registration.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "append_call.hpp"
#include "call.hpp"
#include "merge_call.hpp"

namespace tandem::harness {

/// Where products of 8 bits are added up: tensor cores cut the sums of e4m3 to 13 bits behind the point.
enum class Accumulators { f32, tensor_cores };

/// A way to run a Call. Tensors are host memory between guard pages; a runner for a device copies the boxes'
/// bytes there and back, so that it works on the same strides.
class Runner {
 public:
  virtual ~Runner() = default;
  [[nodiscard]] virtual std::string name() const = 0;
  /// Why this runner cannot run a case; empty if it can.
  [[nodiscard]] virtual std::string refuses(const Case&) const { return {}; }
  /// Why this runner finds no max_logits of a case that it can run; empty if it does.
  [[nodiscard]] virtual std::string refuses_max_logits(const Case&) const { return "not found here"; }
  /// Writes call.out and call.lse, and call.max_logits where given, or the gradients from them.
  virtual void forward(Call& call) = 0;
  virtual void backward(Call& call) = 0;
  /// Whether a sequence's bits do not depend on what else is in the batch. The contract promises it with a
  /// split size.
  [[nodiscard]] virtual bool keeps_bits_beside_others(const Case&) const { return true; }
  /// Of gradients in 8 bits.
  [[nodiscard]] virtual Accumulators accumulators() const { return Accumulators::f32; }

  /// Why this runner cannot append, or merge; empty if it can.
  [[nodiscard]] virtual std::string refuses_append(const AppendCase&) const { return "not run here"; }
  [[nodiscard]] virtual std::string refuses_merge(const MergeCase&) const { return "not run here"; }
  /// Writes the caches and q_out.
  virtual void append(AppendCall&) {}
  /// Writes out and lse.
  virtual void merge(MergeCall&) {}
};

/// All runners of this machine; the CPU ones are there from the start: one a Target of the processor (under
/// the sanitizers without the portable one, which they do not watch).
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

/// The same of calls to append_kv and merge.
void on_every_runner(const AppendCase& spec, const std::function<void(Runner&)>& f);
void on_every_runner(const MergeCase& spec, const std::function<void(Runner&)>& f);
void run_everywhere(AppendCall& call);
void run_everywhere(const AppendCase& spec);
void run_everywhere(MergeCall& call);
void run_everywhere(const MergeCase& spec);

}  // namespace tandem::harness
