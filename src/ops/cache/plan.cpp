#include "ops/cache/plan.hpp"

#include "ops/cache/launch.hpp"

namespace tandem {

AppendConfig choose_append_config(const AppendProblem& problem) {
  AppendConfig c;
  c.from = gpu::stored(problem.k_new.dtype);
  c.to = gpu::stored(problem.k_cache.dtype);
  c.rotary = problem.cos.given();
  c.interleaved = c.rotary && problem.interleaved;
  c.f32_tables = !c.rotary || problem.cos.dtype == DType::f32;
  c.vectors = gpu::allows_append_vectors(problem);
  c.finds_scales = problem.k_scale_cache.given() || problem.v_scale_cache.given();
  return c;
}

MergeConfig choose_merge_config(const MergeProblem& problem) {
  return {.from = gpu::stored(problem.parts.front().out.dtype),
          .to = gpu::stored(problem.out.dtype),
          .vectors = gpu::allows_merge_vectors(problem)};
}

std::vector<AppendConfig> shipped_append_configs() {
  std::vector<AppendConfig> configs;
  for (const Stored from : {Stored::bf16, Stored::f16}) {
    for (const Stored to : {from, Stored::e4m3}) {
      for (const bool rotary : {false, true}) configs.push_back({.from = from, .to = to, .rotary = rotary});
    }
  }
  configs.push_back({.from = Stored::e4m3, .to = Stored::bf16});
  return configs;
}

std::vector<MergeConfig> shipped_merge_configs() {
  return {{.from = Stored::f32, .to = Stored::bf16},
          {.from = Stored::bf16, .to = Stored::bf16},
          {.from = Stored::f32, .to = Stored::f32}};
}

gpu::AppendSteps append_steps(const AppendProblem& problem, const AppendConfig& config, int multiprocessors) {
  gpu::AppendSteps steps{.problem = problem, .list = {}};
  const std::int64_t grid = gpu::append_grid(problem, config, multiprocessors);
  if (grid > 0) {
    steps.list.add(
        {.kernel = &gpu::kernels::append, .config = config, .grid = static_cast<unsigned int>(grid)});
  }
  return steps;
}

gpu::MergeSteps merge_steps(const MergeProblem& problem, const MergeConfig& config, int multiprocessors) {
  gpu::MergeSteps steps{.problem = problem, .list = {}};
  const std::int64_t grid = gpu::merge_grid(problem, multiprocessors);
  if (grid > 0) {
    steps.list.add(
        {.kernel = &gpu::kernels::merge, .config = config, .grid = static_cast<unsigned int>(grid)});
  }
  return steps;
}

}  // namespace tandem
