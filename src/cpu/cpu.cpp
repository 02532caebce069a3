#include "cpu/cpu.hpp"

#include "cpu/backward/add.hpp"
#include "cpu/backward/gate.hpp"
#include "cpu/common/workspace.hpp"
#include "cpu/eight_bit/gradients.hpp"
#include "cpu/quantize/dequantize.hpp"
#include "problem/mixed.hpp"

namespace tandem::cpu {
namespace {

/// Whether K and V are dequantized before the pass.
bool copies(const Problem& p) {
  return p.mixed() && has_fine_scales(p);
}

void run_pass(const Plan& plan, const Problem& problem, std::byte* workspace, Stop* stop) {
  if (std::holds_alternative<EightBitPlan>(plan.pass)) {
    const bool is_forward = problem.pass == Pass::forward;
    return (is_forward ? eight_bit_forward : eight_bit_gradients)(plan, problem, workspace, stop);
  }
  if (std::holds_alternative<ForwardPlan>(plan.pass)) return forward(plan, problem, workspace, stop);
  backward(plan, problem, workspace, stop);
}

}  // namespace

Plan::Plan(const Problem& call, int threads)
    : Plan(copies(call) ? dequantized(call) : call, choose(call, threads)) {
  if (!copies(call)) return;
  mixed = call;
  copied_bytes = mixed_space(call).bytes;
  workspace_bytes += copied_bytes + scratch_alignment;
}

Plan::Plan(const Problem& call, const Config& chosen) : problem(call), config(chosen) {
  const auto plan_as = [&](auto made) {
    workspace_bytes = made.workspace_bytes;
    pass = made;
  };
  if (call.pass == Pass::forward && call.precision != Precision::exact) {
    plan_as(plan_eight_bit(call, config));
    return;
  }
  if (call.has_function()) functions.emplace(call);
  const CallFunctions* const compiled = functions ? &*functions : nullptr;
  if (call.pass == Pass::forward) {
    plan_as(plan_forward(call, config, compiled));
    return;
  }
  if (call.backward_precision != Precision::exact) {
    config.block_q = config.block_k = quant_block;
    plan_as(plan_eight_bit_gradients(call, config));
  } else {
    plan_as(plan_backward(call, config, compiled));
  }
  copied_bytes = added_bytes(call) + gated_bytes(call);
  if (copied_bytes > 0) workspace_bytes += copied_bytes + scratch_alignment;
}

void run(const Plan& plan, std::span<std::byte> workspace, Stop* stop) {
  if (plan.copied_bytes == 0) return run_pass(plan, plan.problem, workspace.data(), stop);
  std::byte* const memory = align_scratch(workspace.data());
  Problem problem = plan.problem;
  if (plan.mixed) {
    place_dequantized(problem, memory);
    dequantize(*plan.mixed, problem, plan.config.threads);
  } else {
    problem = with_gradients_in(memory, problem);
    if (problem.gate.given())
      problem = behind_gate(memory + added_bytes(problem), problem, plan.config.threads);
  }
  run_pass(plan, problem, memory + plan.copied_bytes, stop);
  if (!plan.mixed) add_gradients(plan.problem, problem, plan.config.threads);
}

}  // namespace tandem::cpu
