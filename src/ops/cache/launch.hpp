// From calls to append_kv and merge to what their kernels are launched with. Pure: needs no driver, so that
// the emulator's tests use it too.
#pragma once

#include "gpu/kernel_spec.hpp"
#include "problem/append_problem.hpp"
#include "problem/merge_problem.hpp"

namespace tandem::gpu {

Stored stored(DType dtype);

/// Whether every row that the problem reads or writes allows the accesses of AppendConfig::vectors.
bool allows_append_vectors(const AppendProblem& problem);
/// Thread blocks of the launch on a device of so many multiprocessors; 0 if there is nothing to do.
std::int64_t append_grid(const AppendProblem& problem, const AppendConfig& config, int multiprocessors);
/// For a launch of `grid` thread blocks.
AppendParams make_append_params(const AppendProblem& problem, std::int64_t grid);

bool allows_merge_vectors(const MergeProblem& problem);
std::int64_t merge_grid(const MergeProblem& problem, int multiprocessors);
bool same_strides(const Operand& a, const Operand& b);
/// Whether the parts lie at even distances. If not they are merge_most_parts at most.
bool parts_are_even(const MergeProblem& problem);
MergeParams make_merge_params(const MergeProblem& problem);

namespace kernels {
inline constexpr KernelSpec append{
    .header = "ops/cache/common/append.cuh", .entry = "append", .block = [](const KernelConfig&) {
      return BlockShape{.threads = append_threads, .shared_bytes = append_shared_bytes};
    }};
inline constexpr KernelSpec merge{
    .header = "ops/cache/common/merge.cuh", .entry = "merge", .block = [](const KernelConfig&) {
      return BlockShape{.threads = merge_threads};
    }};
}  // namespace kernels

}  // namespace tandem::gpu
