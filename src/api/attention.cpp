// The public functions: arguments -> Problem -> Plan -> backend.
#include "tandem/attention.hpp"

#include <algorithm>
#include <cstddef>

#include "api/call.hpp"
#include "api/check.hpp"
#include "api/explain.hpp"
#include "api/trace.hpp"
#include "api/workspace.hpp"
#include "cpu/cpu.hpp"
#include "ops/plan.hpp"
#include "ops/run.hpp"
#include "problem/effective.hpp"
#include "problem/mask_window.hpp"

namespace tandem {
namespace {

/// What is left to check once there is a problem, and the plan.
Plan checked_plan(const Problem& problem, const Execution& execution) {
  check::threads(execution.threads);
  if (execution.workspace == nullptr && execution.workspace_bytes > 0) {
    check::invalid("workspace is NULL but workspace_bytes is {}; pass the memory too, or 0 bytes",
                   execution.workspace_bytes);
  }
  if (execution.sm_limit < 0) {
    check::invalid("sm_limit is {}; it must be at least 1, or 0 for all SMs", execution.sm_limit);
  }
  return make_plan(problem, execution);
}

}  // namespace

Call::Call(const ForwardArgs& args, const Execution& execution, Memory memory)
    : problem(make_problem(args, memory)), plan(checked_plan(problem, execution)) {}

Call::Call(const BackwardArgs& args, const Execution& execution, Memory memory)
    : problem(make_problem(args, memory)), plan(checked_plan(problem, execution)) {}

void run(const Call& call, const Execution& execution) {
  const auto& [problem, plan] = call;
  Trace trace(problem, plan);
  trace.add_plan([&] { return explain(problem, plan, execution); });
  if (plan.backend == Device::Kind::cuda) {
    if (execution.workspace != nullptr) check_workspace(execution, plan.workspace_bytes);
    return gpu::run(*plan.gpu, execution.stream, execution.workspace);
  }
  const Workspace workspace(execution, plan.workspace_bytes);
  cpu::Stop stop(execution.interrupted, execution.interrupted_context);
  cpu::run(*plan.cpu, workspace.memory(), &stop);
  stop.throw_if_heard();
}

void forward(const ForwardArgs& args, const Execution& execution) {
  run(Call(args, execution, Memory::present), execution);
}

void backward(const BackwardArgs& args, const Execution& execution) {
  run(Call(args, execution, Memory::present), execution);
}

std::size_t described_bytes(const Call& call, const Execution& execution) {
  Problem joined = call.problem;
  bool differs = false;
  const auto join = [&differs](auto& a, auto& b) {
    alignas(256) static constexpr std::byte anywhere{};
    if (!a.given() || !b.given() || (a.data != &nowhere && b.data != &nowhere)) return;
    a.data = b.data = const_cast<std::byte*>(&anywhere);
    differs = true;
  };
  join(joined.k, joined.v);
  join(joined.cu_seqlens_q, joined.cu_seqlens_k);
  join(joined.seqused_q, joined.seqused_k);
  if (!differs) return call.plan.workspace_bytes;
  fold_mask_window(joined);
  return std::max(call.plan.workspace_bytes, make_plan(joined, execution).workspace_bytes);
}

std::size_t workspace_bytes(const ForwardArgs& args, const Execution& execution) {
  return described_bytes(Call(args, execution, Memory::described), execution);
}

std::size_t workspace_bytes(const BackwardArgs& args, const Execution& execution) {
  return described_bytes(Call(args, execution, Memory::described), execution);
}

std::string explain(const ForwardArgs& args, const Execution& execution) {
  const Call call(args, execution, Memory::described);
  return explain(call.problem, call.plan, execution);
}

std::string explain(const BackwardArgs& args, const Execution& execution) {
  const Call call(args, execution, Memory::described);
  return explain(call.problem, call.plan, execution);
}

const char* version() noexcept {
  return TANDEM_VERSION;
}

}  // namespace tandem
