#include "ops/plan.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <variant>

#include "ops/backward/plan.hpp"
#include "ops/backward/sm80_plan.hpp"
#include "ops/decode/plan.hpp"
#include "ops/eight_bit/plan.hpp"
#include "ops/eight_bit_backward/plan.hpp"
#include "ops/forward/plan.hpp"
#include "ops/forward/sm80_plan.hpp"
#include "ops/functions/plan.hpp"
#include "ops/latent/plan.hpp"
#include "ops/pack/launch.hpp"
#include "ops/plan_gpu.hpp"
#include "ops/portable_set.hpp"
#include "problem/mixed.hpp"
#include "problem/recipe_of.hpp"

namespace tandem {
namespace {

Plan plan_cpu(const Problem& problem, const Execution& execution) {
  Plan plan;
  plan.backend = Device::Kind::cpu;
  plan.workspace_bytes = plan.cpu.emplace(problem, execution.threads).workspace_bytes;
  return plan;
}

}  // namespace

Plan::Plan() = default;

Plan make_plan(const Problem& problem, const Execution& execution) {
  if (problem.device.kind == Device::Kind::cuda) return plan_gpu(problem, nullptr, execution.sm_limit);
  return plan_cpu(problem, execution);
}

namespace {

std::vector<std::string> cuda_reasons(const Problem& problem, const CallFacts& facts,
                                      const gpu::Steps& steps) {
  const Problem& p = facts.problem;
  if (!facts.portable.empty()) return explain_portable(facts, steps.config);
  if (const auto* c = std::get_if<EightBitBackwardConfig>(&steps.config))
    return explain_eight_bit_backward(facts, *c);
  if (facts.problem.pass == Pass::backward)
    return gpu::visit_backward(steps.config, [&](const auto& c) { return explain_backward(facts, c); });
  if (const auto* c = std::get_if<EightBitConfig>(&steps.config)) {
    return explain_eight_bit(p, steps.recipe, *c);
  }
  std::vector<std::string> lines =
      gpu::visit_forward(steps.config, [&](const auto& c) { return explain_forward(facts, c); });
  if (problem.quantized_inputs()) {
    lines.push_back(fmt::format(
        "q, in {}, becomes {} first, which has all of its values; its scale is a factor of the scores",
        name_of(problem.q.dtype), name_of(p.q.dtype)));
  }
  if (p.rows_q != problem.rows_q) {
    lines.push_back(fmt::format("one query: the {} heads that share keys are rows of a tile", p.rows_q));
  }
  return lines;
}

std::vector<std::string> cpu_reasons(const Plan& plan, const Execution& execution) {
  const cpu::Config& c = plan.cpu->config;
  const char* wish = std::getenv("TANDEM_CPU_TARGET");
  const bool overridden = wish != nullptr && *wish != '\0';
  const std::string why = cpu::why_best_target();
  const std::string best = "the best that this processor and this build have";
  std::vector<std::string> lines{
      "backend cpu: the tensors are on the CPU",
      fmt::format("target {}: {}", cpu::name_of(c.target),
                  overridden    ? "TANDEM_CPU_TARGET asks for it"
                  : why.empty() ? best
                                : best + "; " + why),
      fmt::format("threads {}: {}", c.threads,
                  execution.threads > 0 ? "what the caller asked for"
                                        : "OMP_NUM_THREADS, or every core this process may use"),
      fmt::format("block_q {}, block_k {}: the tile one thread works on", c.block_q, c.block_k),
  };
  if (const auto* eight_bit = std::get_if<cpu::EightBitPlan>(&plan.cpu->pass)) {
    lines.emplace_back(eight_bit->on_unit
                           ? "products: of s8 on the matrix unit, added up in 32-bit integers"
                           : "products: of 8-bit values in f32, with the sums of a matrix unit");
  }
  return lines;
}

}  // namespace

std::vector<std::string> reasons(const Problem& problem, const Plan& plan, const Execution& execution) {
  const bool cuda = plan.backend == Device::Kind::cuda;
  std::vector<std::string> lines =
      cuda ? cuda_reasons(problem, *plan.facts, *plan.gpu) : cpu_reasons(plan, execution);
  if (cuda) {
    lines.insert(lines.begin(),
                 fmt::format("backend cuda: the tensors are on {}", gpu::called(problem.device.index)));
  }
  const bool copied = cuda ? !plan.facts->problem.mixed() : plan.cpu->mixed.has_value();
  if (problem.mixed() && copied) {
    lines.push_back(fmt::format("mixed: k and v, in {}, become {} first, in {} bytes of the workspace",
                                name_of(problem.k.dtype), name_of(problem.q.dtype),
                                mixed_space(problem).bytes));
  } else if (problem.mixed() && !cuda) {
    lines.push_back(fmt::format("mixed: k and v, in {}, are converted where they are read, without a copy",
                                name_of(problem.k.dtype)));
  }
  if (cuda && problem.gate.given() && problem.pass == Pass::backward) {
    lines.push_back(fmt::format(
        "gate: backward_gated_preprocess makes dgate, and the gradient of O in {} bytes of the workspace",
        gpu::packed_bytes(gpu::loaded_tensor(problem, gpu::Loaded::dout))));
  }
  if (cuda && execution.sm_limit > 0) {
    lines.push_back(fmt::format("sm_limit {}: persistent grids are those of a GPU with {} SMs",
                                execution.sm_limit, plan.gpu->multiprocessors));
  }
  if (cuda && problem.has_function()) {
    const bool lists = std::visit(
        [](const auto& c) {
          if constexpr (requires { c.functions; }) return c.functions.block_lists;
          return false;
        },
        plan.gpu->config);
    lines.push_back(explain_gpu_functions(problem, lists));
  }
  if (problem.split_size > 0 && problem.pass == Pass::forward) {
    lines.push_back(fmt::format(
        "split_size {}: keys are cut at its multiples; a sequence's bits do not depend on the batch",
        problem.split_size));
    if (cuda && plan.gpu->work.items > 0) {
      const gpu::WorkDivision& work = plan.gpu->work;
      lines.push_back(work.levels == 0
                          ? fmt::format("the workspace has places for all {} splits", work.items)
                          : fmt::format("the workspace has places for {} splits; where lengths make more of "
                                        "them, a thread block computes and merges {} or more in turn",
                                        work.items, merged_group));
    }
  }
  if (problem.precision == Precision::exact) return lines;
  const bool in_16 = problem.backward_precision == Precision::exact;
  const std::string what =
      problem.pass == Pass::backward
          ? in_16 ? "the backward of an 8-bit forward is 16-bit" : "gradients by products in s8 and e4m3"
          : describe(cuda ? plan.gpu->recipe : plan.cpu->config.recipe);
  lines.push_back(
      fmt::format("precision {}{}{}: {}", name_of(problem.precision), problem.strict ? ", strict" : "",
                  problem.quantized_inputs() ? ", of the caller's quantized values and scales" : "", what));
  return lines;
}

}  // namespace tandem
