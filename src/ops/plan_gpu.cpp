#include "ops/plan_gpu.hpp"

#include <algorithm>
#include <climits>

#include "ops/backward/plan.hpp"
#include "ops/backward/sm80_plan.hpp"
#include "ops/cache/launch.hpp"
#include "ops/cache/plan.hpp"
#include "ops/decode/plan.hpp"
#include "ops/eight_bit/plan.hpp"
#include "ops/eight_bit_backward/plan.hpp"
#include "ops/forward/plan.hpp"
#include "ops/forward/sm80_plan.hpp"
#include "ops/functions/plan.hpp"
#include "ops/latent/plan.hpp"
#include "ops/portable_set.hpp"
#include "ops/quantize/plan.hpp"
#include "ops/steps.hpp"
#include "plan/checks.hpp"
#include "plan/unsupported.hpp"
#include "problem/recipe_of.hpp"

namespace tandem {

void check_gpu(int index) {
  static_cast<void>(facts_of(gpu::properties(index)));
}

namespace {

/// The family that a Config has, where it has one.
void set_family(const gpu::KernelConfig& config, Family& family) {
  std::visit(
      [&](const auto& c) {
        if constexpr (requires { c.family; }) family = c.family;
      },
      config);
}

/// A GPU that is not known has shared memory as its compute capability is expected to.
void check_shared(const DeviceFacts& facts, int needed) {
  const gpu::DeviceProperties& device = *facts.properties;
  if (device.shared_bytes_per_block <= 0 || needed <= device.shared_bytes_per_block) return;
  unsupported(
      "the kernel takes {} bytes of shared memory, which compute capability {}.{} is expected to have; {} "
      "has {}; copy the tensors to the CPU",
      needed, device.major, device.minor, device.name, device.shared_bytes_per_block);
}

gpu::KernelConfig choose_backward(const CallFacts& facts) {
  if (facts.family != Family::sm80) return choose_backward_config(facts);
  return facts.portable.empty() ? choose_sm80_backward_config(facts) : portable_backward_config(facts);
}

void plan_backward(gpu::Steps& steps, const CallFacts& facts, const gpu::KernelConfig* wanted) {
  const gpu::KernelConfig config = wanted != nullptr ? *wanted : choose_backward(facts);
  if (facts.family == Family::sm80) {
    check_shared(facts.device,
                 gpu::visit_backward(config, [](const auto& c) { return backward_shared_bytes(c); }));
  }
  add_backward(steps, config);
}

void plan_eight_bit(gpu::Steps& steps, const CallFacts& facts, const gpu::KernelConfig* wanted) {
  steps.recipe = recipe_of(facts.problem);
  const EightBitConfig config =
      wanted != nullptr ? std::get<EightBitConfig>(*wanted) : choose_eight_bit_config(facts, steps.recipe);
  add_eight_bit(steps, config, choose_quantize_config(facts, steps.recipe));
}

void plan_eight_bit_backward(gpu::Steps& steps, const CallFacts& facts, const gpu::KernelConfig* wanted) {
  steps.recipe = recipe_of(facts.problem.backward_precision, facts.problem.strict);
  const EightBitBackwardConfig config =
      wanted != nullptr ? std::get<EightBitBackwardConfig>(*wanted) : choose_eight_bit_backward_config(facts);
  add_eight_bit_backward(steps, config, choose_gradient_quantizer(facts, steps.recipe));
}

gpu::KernelConfig choose_forward(const CallFacts& facts) {
  if (facts.family == Family::sm80) {
    return with_functions(
        facts.portable.empty() ? choose_sm80_forward_config(facts) : portable_forward_config(facts),
        facts.problem);
  }
  if (facts.wide_heads) return choose_latent_config(facts);
  if (facts.decodes) return choose_decode_config(facts);
  return with_functions(choose_forward_config(facts), facts.problem);
}

void plan_forward(gpu::Steps& steps, const Problem& asked, const CallFacts& facts,
                  const gpu::KernelConfig* wanted) {
  if (facts.dequantizes) add_dequantize(steps, asked, choose_dequantize_config(asked, facts.mask.varlen));
  if (facts.widens_queries) add_widened_queries(steps, asked);
  const gpu::KernelConfig config = wanted != nullptr ? *wanted : choose_forward(facts);
  if (facts.family == Family::sm80) {
    check_shared(facts.device,
                 gpu::visit_forward(config, [](const auto& c) { return forward_shared_bytes(c); }));
  }
  add_forward(steps, config);
}

}  // namespace

Plan plan_gpu(const Problem& problem, const gpu::KernelConfig* wanted, int sm_limit) {
  check_problem(problem);
  DeviceFacts device = facts_of(gpu::properties(problem.device.index));
  if (wanted != nullptr) set_family(*wanted, device.family);
  Plan plan;
  plan.backend = Device::Kind::cuda;
  const CallFacts& facts = plan.facts.emplace(problem, device);
  check_family(problem, facts, sm_limit);
  gpu::Steps& steps = plan.gpu.emplace(facts.problem);
  steps.multiprocessors = sm_limit > 0 ? std::min(sm_limit, device.multiprocessors) : device.multiprocessors;
  if (problem.pass == Pass::backward && problem.backward_precision != Precision::exact) {
    plan_eight_bit_backward(steps, facts, wanted);
  } else if (problem.pass == Pass::backward) {
    plan_backward(steps, facts, wanted);
  } else if (problem.precision != Precision::exact) {
    plan_eight_bit(steps, facts, wanted);
  } else {
    plan_forward(steps, problem, facts, wanted);
  }
  plan.workspace_bytes = steps.workspace.bytes();
  return plan;
}

namespace {

/// What kernels with 8-bit instructions of Hopper need.
void check_hopper(int index, const char* what) {
  check_gpu(index);
  const gpu::DeviceProperties& device = gpu::properties(index);
  if (gpu::is_hopper(device)) return;
  unsupported("{} has no kernel for {} of compute capability {}.{} yet; copy the tensors to the CPU", what,
              gpu::called(index), device.major, device.minor);
}

}  // namespace

gpu::QuantizeSteps plan_quantize(const QuantizeProblem& problem) {
  check_hopper(problem.device.index, "quantize");
  if (problem.x.dtype == DType::f32) {
    unsupported("quantize has no GPU kernel for f32; convert x to f16 or bf16, or copy it to the CPU");
  }
  return quantize_steps(problem, choose_tensor_config(problem),
                        gpu::properties(problem.device.index).multiprocessors);
}

gpu::AppendSteps plan_append(const AppendProblem& problem) {
  // The kernel counts the elements of a row, too.
  const std::int64_t row = std::max(problem.heads_kv * std::max(problem.head_dim_k, problem.head_dim_v),
                                    problem.heads_q * problem.head_dim_k);
  for (const std::int64_t extent :
       {problem.tokens(), problem.batch, problem.heads_kv, problem.heads_q, row}) {
    if (extent > INT_MAX / 2) {
      unsupported("an extent of {} is above the GPU kernels' {}; split the append", extent, INT_MAX / 2);
    }
  }
  check_gpu(problem.device.index);
  if (is_eight_bit(problem.k_cache.dtype) || is_eight_bit(problem.k_new.dtype))
    check_hopper(problem.device.index, "append_kv of 8-bit rows, or to a cache of 8 bits");
  return append_steps(problem, choose_append_config(problem),
                      gpu::properties(problem.device.index).multiprocessors);
}

gpu::MergeSteps plan_merge(const MergeProblem& problem) {
  for (const std::int64_t extent : {problem.rows, problem.heads}) {
    if (extent > INT_MAX) {
      unsupported("an extent of {} is above the GPU kernels' {}; split the call", extent, INT_MAX);
    }
  }
  const MergePart& first = problem.parts.front();
  for (std::size_t i = 1; i < problem.parts.size(); ++i) {
    const bool same = gpu::same_strides(problem.parts[i].out, first.out) &&
                      gpu::same_strides(problem.parts[i].lse, first.lse);
    if (same) continue;
    unsupported(
        "outs[{}] or its lse has other strides than outs[0]; on a GPU all parts have one layout: make "
        "them contiguous",
        i);
  }
  if (problem.parts.size() > merge_most_parts && !gpu::parts_are_even(problem)) {
    unsupported(
        "outs has {} parts in places of their own, above the GPU kernel's {}; stack them in one tensor",
        problem.parts.size(), merge_most_parts);
  }
  check_gpu(problem.device.index);
  return merge_steps(problem, choose_merge_config(problem),
                     gpu::properties(problem.device.index).multiprocessors);
}

}  // namespace tandem
