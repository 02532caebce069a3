// A call on a GPU as src/ops decides it: the problem that its kernels see, the workspace, and the launches
// in their order. gpu::run walks them; explain, tune and the benches read them.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "gpu/kernel_spec.hpp"
#include "gpu/param_fields.hpp"
#include "gpu/workspace.hpp"
#include "problem/append_problem.hpp"
#include "problem/merge_problem.hpp"
#include "problem/quantize_problem.hpp"
#include "tandem/error.hpp"

namespace tandem::gpu {

/// One launch.
struct Step {
  const KernelSpec* kernel;
  KernelConfig config;
  unsigned int grid = 1;
  bool programmatic = false;  ///< may start while the step before it ends (griddepcontrol)
  bool resident = false;      ///< starts when there is room for all of its CTAs, which wait for each other
  Loaded tensor = Loaded::q;  ///< that kernels::pack copies
};

/// The most launches that a call has: packed q, k, v and dout, and six kernels of backward.
constexpr std::size_t most_steps = 10;

/// Up to most_steps, in place: planning a call allocates nothing, and costs nothing for those that it has
/// not.
class StepList {
 public:
  StepList() {}  // NOLINT(modernize-use-equals-default): the union's is deleted

  void add(const Step& step) {
    if (count_ == most_steps) throw Error(Status::internal, "a call has more steps than a list holds");
    std::construct_at(&slots_.steps[count_++], step);
  }
  void clear() { count_ = 0; }

  [[nodiscard]] std::span<const Step> all() const { return {slots_.steps, count_}; }
  [[nodiscard]] const Step* begin() const { return slots_.steps; }
  [[nodiscard]] const Step* end() const { return slots_.steps + count_; }
  [[nodiscard]] std::size_t size() const { return count_; }
  [[nodiscard]] bool empty() const { return count_ == 0; }

 private:
  union Slots {
    Slots() {}  // NOLINT(modernize-use-equals-default)
    Step steps[most_steps];
  };
  Slots slots_;
  std::size_t count_ = 0;
};

/// How a forward launch divides its work, and the room that partial results take.
struct WorkDivision {
  int ctas = 0;  ///< as many as multiprocessors hold, or one a work item where there are fewer
  std::int64_t part_outputs = 0;  ///< numbers of ForwardParams::part_out
  std::int64_t part_sums = 0;
  std::int64_t combine_ctas = 0;  ///< CTAs of the kernel `combine`, one without a tile; 0: nothing to merge
  int split_blocks = 0;           ///< as in ForwardParams
  int part_rows = 0;
  int most_ctas = 0;  ///< split_ctas, split_few_ctas and split_least: with pairs clusters are counted
  int few_ctas = 0;
  int least = 1;
  int items = 0;   ///< split_items
  int levels = 0;  ///< split_levels
  int gain = 0;    ///< split_gain
};

struct Steps {
  Steps() = default;
  explicit Steps(const Problem& asked) : problem(asked) {}

  /// Heads folded into rows, quantized values of a mixed call dequantised unless the forward kernel reads
  /// them, tensors packed. Operands in the workspace have their strides and any address.
  Problem problem;
  /// By Loaded: the caller's, of those that steps copy to the workspace.
  std::array<std::optional<Operand>, loaded_count> sources;
  std::optional<Scales> q_scale;  ///< the caller's, where problem.q_scale is a product in the workspace
  LoadedMaps maps;
  Recipe recipe;        ///< read where the problem has a precision
  KernelConfig config;  ///< the main kernel's, which an empty problem does not launch
  int multiprocessors = 0;
  WorkDivision work;  ///< for a 16-bit forward call: add_forward divides it
  Workspace workspace;
  StepList list;
};

/// The steps of a call to tandem::quantize.
struct QuantizeSteps {
  QuantizeProblem problem;
  Workspace workspace;
  StepList list;
};

/// The steps of a call to append_kv, and below of one to merge. Neither takes a workspace.
struct AppendSteps {
  AppendProblem problem;
  StepList list;
};
struct MergeSteps {
  MergeProblem problem;
  StepList list;
};

}  // namespace tandem::gpu
