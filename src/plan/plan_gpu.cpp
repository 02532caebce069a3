#include "plan/plan_gpu.hpp"

#include <fmt/format.h>

#include <climits>

#include "gpu/backward.hpp"
#include "gpu/device.hpp"
#include "gpu/eight_bit_forward.hpp"
#include "gpu/forward.hpp"
#include "gpu/mixed_forward.hpp"
#include "kernels/config/fields.hpp"
#include "plan/backward_plan.hpp"
#include "plan/eight_bit_plan.hpp"
#include "plan/forward_plan.hpp"
#include "plan/quantize_plan.hpp"
#include "problem/recipe_of.hpp"

namespace tandem {
namespace {

template <typename... Args>
[[noreturn]] void unsupported(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(Status::unsupported, fmt::format(format, std::forward<Args>(args)...));
}

/// What the kernels cannot do, whatever the device.
void check_problem(const Problem& p) {
  if (p.of_codes() && p.precision == Precision::exact) {
    unsupported(
        "{} with precision exact has no GPU kernel; pass precision fp8, or copy the tensors to the CPU",
        name_of(p.q.dtype));
  }
  if (p.of_codes() && p.out.dtype == DType::f32) {
    unsupported("out in f32 has no GPU kernel; make it bf16 or f16, or copy the tensors to the CPU");
  }
  if (!p.of_codes() && p.q.dtype != DType::f16 && p.q.dtype != DType::bf16) {
    unsupported("{} has no GPU kernel; convert q, k and v to f16 or bf16, or copy them to the CPU",
                name_of(p.q.dtype));
  }
  for (const std::int64_t head_dim : {p.head_dim_qk, p.head_dim_v}) {
    if (head_dim > 256)
      unsupported("head_dim {} is above 256, the GPU kernels' most; copy the tensors to the CPU", head_dim);
  }
  for (const std::int64_t extent : {p.rows_q, p.rows_k, p.heads_q, p.batch}) {
    if (extent > INT_MAX)
      unsupported("an extent of {} is above the GPU kernels' {}; split the call", extent, INT_MAX);
  }
}

}  // namespace

void check_gpu(int index) {
  const gpu::DeviceProperties& device = gpu::properties(index);
  if (!gpu::is_supported(device)) {
    unsupported(
        "cuda:{} ({}) has compute capability {}.{}; the GPU kernels need 9.0 (Hopper); copy the tensors to "
        "the CPU",
        index, device.name, device.major, device.minor);
  }
}

Plan plan_gpu(const Problem& problem) {
  check_problem(problem);
  check_gpu(problem.device.index);
  Plan plan;
  plan.backend = Device::Kind::cuda;
  if (problem.pass == Pass::forward && problem.precision != Precision::exact) {
    plan.recipe = recipe_of(problem);
    plan.eight_bit = choose_eight_bit_config(problem, plan.recipe);
    plan.quantize = choose_quantize_config(problem, plan.recipe);
    plan.workspace_bytes = gpu::eight_bit_forward_workspace_bytes(problem, plan.recipe, plan.eight_bit);
  } else if (problem.mixed()) {
    plan.forward = choose_forward_config(heads_as_rows(dequantized(problem, nullptr)));
    plan.quantize = choose_dequantize_config(problem);
    plan.workspace_bytes = gpu::mixed_forward_workspace_bytes(problem, plan.forward);
  } else if (problem.pass == Pass::forward) {
    const Problem folded = heads_as_rows(problem);
    plan.forward = choose_forward_config(folded);
    plan.workspace_bytes = gpu::forward_workspace_bytes(folded, plan.forward);
  } else {
    plan.backward = choose_backward_config(problem);
    plan.workspace_bytes = gpu::backward_workspace_bytes(problem, plan.backward);
  }
  return plan;
}

}  // namespace tandem
