#include "plan/plan_gpu.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <tuple>
#include <utility>

#include "gpu/append_params.hpp"
#include "gpu/device.hpp"
#include "gpu/forward_params.hpp"
#include "gpu/kernels.hpp"
#include "kernels/config/fields.hpp"
#include "plan/append_plan.hpp"
#include "plan/backward_plan.hpp"
#include "plan/eight_bit_plan.hpp"
#include "plan/family.hpp"
#include "plan/few_queries.hpp"
#include "plan/forward_plan.hpp"
#include "plan/function_plan.hpp"
#include "plan/portable_set.hpp"
#include "plan/quantize_plan.hpp"
#include "plan/sm80_backward_plan.hpp"
#include "plan/sm80_forward_plan.hpp"
#include "plan/steps.hpp"
#include "problem/effective.hpp"
#include "problem/mixed.hpp"
#include "problem/recipe_of.hpp"

namespace tandem {
namespace {

template <typename... Args>
[[noreturn]] void unsupported(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(Status::unsupported, fmt::format(format, std::forward<Args>(args)...));
}

/// The same of heads of more than 256 dimensions, which the 16-bit forward kernel alone takes.
void check_wide_heads(const Problem& p) {
  const bool forward = p.pass == Pass::forward && p.precision == Precision::exact;
  const std::int64_t most_qk = forward ? max_gpu_wide_head_dim_qk : max_gpu_head_dim;
  const std::int64_t most_v = forward ? max_gpu_wide_head_dim_v : max_gpu_head_dim;
  const char* const kernels = p.pass == Pass::backward          ? "the GPU kernels of gradients"
                              : p.precision != Precision::exact ? "the 8-bit GPU kernels"
                                                                : "the GPU kernels";
  for (const auto& [name, head_dim, most] :
       {std::tuple{"head_dim", p.head_dim_qk, most_qk}, std::tuple{"head_dim_v", p.head_dim_v, most_v}}) {
    if (head_dim <= most) continue;
    unsupported("{} {} is above {}, the most of {}; copy the tensors to the CPU, which takes up to {}", name,
                head_dim, most, kernels, max_head_dim);
  }
  if (p.mixed() || has_exact_quantized_inputs(p)) {
    unsupported(
        "head dimensions {} and {} with k and v in {} have no GPU kernel, those up to {} do; keep k and "
        "v in {}, or copy the tensors to the CPU",
        p.head_dim_qk, p.head_dim_v, name_of(p.k.dtype), max_gpu_head_dim,
        name_of(p.mixed() ? p.q.dtype : p.out.dtype));
  }
}

/// What the kernels of 8-bit products cannot do.
void check_eight_bits(const Problem& p) {
  if (p.out.dtype == DType::f32) {
    unsupported(
        "out in f32 with precision {} has no GPU kernel; make it bf16 or f16, leave the precision exact, or "
        "copy the tensors to the CPU",
        name_of(p.precision));
  }
  if (p.causal_by_sequence.given()) {
    unsupported(
        "causal_by_sequence with precision {} has no GPU kernel; leave the precision exact, or copy the "
        "tensors to the CPU",
        name_of(p.precision));
  }
}

/// What the kernels cannot do, whatever the device.
void check_problem(const Problem& p) {
  if (p.precision != Precision::exact) check_eight_bits(p);
  if (!p.quantized_inputs() && p.q.dtype != DType::f16 && p.q.dtype != DType::bf16) {
    unsupported("{} has no GPU kernel; convert q, k and v to f16 or bf16, or copy them to the CPU",
                name_of(p.q.dtype));
  }
  if (has_wide_heads(p)) check_wide_heads(p);
  for (const std::int64_t extent : {p.rows_q, p.rows_k, p.heads_q, p.batch, p.cache_batch}) {
    if (extent > INT_MAX)
      unsupported("an extent of {} is above the GPU kernels' {}; split the call", extent, INT_MAX);
  }
}

}  // namespace

void check_gpu(int index) {
  choose_family(gpu::properties(index));
}

namespace {

/// `wanted`, or where there is none what `choose` gives.
template <typename Config, typename Choose>
Config wanted_or(const gpu::KernelConfig* wanted, Choose&& choose) {
  return wanted != nullptr ? std::get<Config>(*wanted) : choose();
}

/// Whether the forward kernel reads the 8-bit k and v of a mixed problem. A cache is not copied: one that TMA
/// cannot read is an error.
bool reads_in_place(const Problem& p) {
  if (!reads_eight_bits(p) || p.has_function()) return false;
  const Tiling tiling = choose_forward_config(p).tiling;
  for (const gpu::Loaded which : {gpu::Loaded::k, gpu::Loaded::v}) {
    const char* const objection = tma_objection(gpu::forward_tensor_map(p, tiling, which));
    if (objection == nullptr) continue;
    if (!p.of_cache()) return false;
    unsupported(
        "{} of a cache in {} cannot be read by TMA: {}; lay it out so that it can, keep the cache in {}, or "
        "copy the tensors to the CPU",
        which == gpu::Loaded::k ? "k" : "v", name_of(p.k.dtype), objection, name_of(p.q.dtype));
  }
  return true;
}

/// e4m3 queries by the exact formula: 16-bit ones that the forward kernel takes beside e4m3 k and v.
void check_exact_quantized(const Problem& p) {
  if (!has_exact_quantized_inputs(p)) return;
  if (p.out.dtype == DType::f32) {
    unsupported(
        "out in f32 of q in {} with precision exact has no GPU kernel; make it bf16 or f16, or copy the "
        "tensors to the CPU",
        name_of(p.q.dtype));
  }
  Problem widened = p;
  widened.q.dtype = p.out.dtype;
  if (reads_in_place(widened)) return;
  unsupported(
      "{} with precision exact has no GPU kernel for more than {} queries a sequence on k and v that are no "
      "cache, for functions, or for rows that are no multiples of 16 bytes; pass precision fp8, or copy the "
      "tensors to the CPU",
      name_of(p.q.dtype), few);
}

/// Why the kernels sm80 are portable on a GPU; those of a GPU that is only described are planned as if all
/// compiled.
std::string why_portable_on(int index) {
  if (index >= gpu::first_described) return {};
  return gpu::why_portable(gpu::architecture_of(gpu::properties(index)));
}

/// The same by the kernels that every GPU from Ampere on runs: what they cannot do yet is an error.
void plan_sm80_steps(gpu::Steps& steps, const Problem& problem, const FamilyChoice& choice,
                     const gpu::KernelConfig* wanted) {
  const gpu::DeviceProperties& device = gpu::properties(problem.device.index);
  const bool backward = problem.pass == Pass::backward;
  const char* const missing = problem.precision != Precision::exact ? "no 8-bit kernel"
                              : is_eight_bit(problem.k.dtype)       ? "no kernel for k and v of 8 bits"
                              : has_wide_heads(problem) ? "no kernel for heads of more than 256 dimensions"
                                                        : nullptr;
  if (missing != nullptr) {
    unsupported("{} takes the kernels sm80 ({}), of which there is {} yet; {}copy the tensors to the CPU",
                gpu::called(problem.device.index), choice.why, missing,
                gpu::is_hopper(device) && choose_family(device).family == Family::sm80
                    ? "unset TANDEM_KERNELS, or "
                    : "");
  }
  steps.portable = why_portable_on(problem.device.index);
  const bool portable = !steps.portable.empty();
  const int shared = shared_bytes_per_sm(device);
  const auto check_shared = [&](int needed) {
    if (device.shared_bytes_per_block > 0 && needed > device.shared_bytes_per_block) {
      unsupported(
          "the kernel takes {} bytes of shared memory, which compute capability {}.{} is expected to have; "
          "{} "
          "has {}; copy the tensors to the CPU",
          needed, device.major, device.minor, device.name, device.shared_bytes_per_block);
    }
  };
  if (backward) {
    const auto config = wanted_or<BackwardConfig>(wanted, [&] {
      return portable ? portable_backward_config(steps.problem)
                      : choose_sm80_backward_config(steps.problem, shared);
    });
    check_shared(backward_shared_bytes(config));
    return add_backward(steps, config);
  }
  fold_heads_into_rows(steps.problem);
  const auto config = wanted_or<ForwardConfig>(wanted, [&] {
    return with_functions(
        portable ? portable_forward_config(steps.problem) : choose_sm80_forward_config(steps.problem, shared),
        steps.problem);
  });
  check_shared(forward_shared_bytes(config));
  add_forward(steps, config);
}

/// `steps` have the problem as it was asked for.
void plan_steps(gpu::Steps& steps, const Problem& problem, const gpu::KernelConfig* wanted) {
  const auto* forward = wanted != nullptr ? std::get_if<ForwardConfig>(wanted) : nullptr;
  const auto* backward = wanted != nullptr ? std::get_if<BackwardConfig>(wanted) : nullptr;
  const FamilyChoice choice = choose_family(problem);
  if (forward != nullptr    ? forward->of_sm80()
      : backward != nullptr ? backward->of_sm80()
                            : choice.family == Family::sm80) {
    return plan_sm80_steps(steps, problem, choice, wanted);
  }
  Problem& p = steps.problem;
  if (problem.pass == Pass::backward) {
    return add_backward(steps, wanted_or<BackwardConfig>(wanted, [&] { return choose_backward_config(p); }));
  }
  if (problem.precision != Precision::exact) {
    steps.recipe = recipe_of(p);
    const auto config =
        wanted_or<EightBitConfig>(wanted, [&] { return choose_eight_bit_config(p, steps.recipe); });
    return add_eight_bit(steps, config, choose_quantize_config(p, steps.recipe));
  }
  const bool widens = has_exact_quantized_inputs(problem);
  if (widens) p.q.dtype = p.out.dtype;  // what its values become
  const bool in_place =
      wanted != nullptr ? std::get<ForwardConfig>(*wanted).has_byte_keys() : reads_in_place(p);
  if (problem.mixed() && !in_place) {
    p = dequantized(problem);
    add_dequantize(steps, problem, choose_dequantize_config(problem));
  }
  fold_heads_into_rows(p);
  if (widens) add_widened_queries(steps, problem);
  add_forward(steps,
              wanted_or<ForwardConfig>(wanted, [&] { return with_functions(choose_forward_config(p), p); }));
}

}  // namespace

Plan plan_gpu(const Problem& problem, const gpu::KernelConfig* wanted, int sm_limit) {
  check_problem(problem);
  check_gpu_functions(problem);
  check_exact_quantized(problem);
  check_gpu(problem.device.index);
  Plan plan;
  plan.backend = Device::Kind::cuda;
  gpu::Steps& steps = plan.gpu.emplace(problem);
  steps.multiprocessors = gpu::properties(problem.device.index).multiprocessors;
  const bool limited = sm_limit > 0 && sm_limit < steps.multiprocessors;
  if (limited) steps.multiprocessors = sm_limit;
  plan_steps(steps, problem, wanted);
  const auto* forward = std::get_if<ForwardConfig>(&steps.config);
  if (limited && forward != nullptr && forward->of_sm80()) {
    unsupported(
        "sm_limit is {}, but the forward kernels sm80, which {} takes, have a CTA for each tile; leave it "
        "out",
        sm_limit, gpu::called(problem.device.index));
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
