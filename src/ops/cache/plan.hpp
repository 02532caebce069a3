// Which kernels calls to append_kv and merge take, and which are shipped.
#pragma once

#include <vector>

#include "gpu/steps.hpp"

namespace tandem {

AppendConfig choose_append_config(const AppendProblem& problem);
MergeConfig choose_merge_config(const MergeProblem& problem);

/// Configs that are compiled into the library: bf16 and f16 rows to caches of their dtype and of e4m3, with
/// and without an embedding, and e4m3 rows to bf16; parts in f32 and bf16 to bf16, and f32 to f32.
std::vector<AppendConfig> shipped_append_configs();
std::vector<MergeConfig> shipped_merge_configs();

/// The steps of a call on a device of so many multiprocessors.
gpu::AppendSteps append_steps(const AppendProblem& problem, const AppendConfig& config, int multiprocessors);
gpu::MergeSteps merge_steps(const MergeProblem& problem, const MergeConfig& config, int multiprocessors);

}  // namespace tandem
