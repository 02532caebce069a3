#include "plan/append_plan.hpp"

#include "gpu/append_params.hpp"

namespace tandem {

AppendConfig choose_append_config(const AppendJob& job) {
  AppendConfig c;
  c.from = gpu::stored(job.k_new.dtype);
  c.to = gpu::stored(job.k_cache.dtype);
  c.rotary = job.cos.given();
  c.interleaved = c.rotary && job.interleaved;
  c.f32_tables = !c.rotary || job.cos.dtype == DType::f32;
  c.vectors = gpu::allows_append_vectors(job);
  return c;
}

MergeConfig choose_merge_config(const MergeJob& job) {
  return {.from = gpu::stored(job.parts.front().out.dtype),
          .to = gpu::stored(job.out.dtype),
          .vectors = gpu::allows_merge_vectors(job)};
}

std::vector<AppendConfig> shipped_append_configs() {
  std::vector<AppendConfig> configs;
  for (const Stored from : {Stored::bf16, Stored::f16}) {
    for (const Stored to : {from, Stored::e4m3}) {
      for (const bool rotary : {false, true}) configs.push_back({.from = from, .to = to, .rotary = rotary});
    }
  }
  return configs;
}

std::vector<MergeConfig> shipped_merge_configs() {
  return {{.from = Stored::f32, .to = Stored::bf16},
          {.from = Stored::bf16, .to = Stored::bf16},
          {.from = Stored::f32, .to = Stored::f32}};
}

gpu::AppendSteps append_steps(const AppendJob& job, const AppendConfig& config, int multiprocessors) {
  gpu::AppendSteps steps{.job = job, .list = {}};
  const std::int64_t grid = gpu::append_grid(job, multiprocessors);
  if (grid > 0) {
    steps.list.add(
        {.kernel = gpu::Kernel::append, .config = config, .grid = static_cast<unsigned int>(grid)});
  }
  return steps;
}

gpu::MergeSteps merge_steps(const MergeJob& job, const MergeConfig& config, int multiprocessors) {
  gpu::MergeSteps steps{.job = job, .list = {}};
  const std::int64_t grid = gpu::merge_grid(job, multiprocessors);
  if (grid > 0) {
    steps.list.add({.kernel = gpu::Kernel::merge, .config = config, .grid = static_cast<unsigned int>(grid)});
  }
  return steps;
}

}  // namespace tandem
