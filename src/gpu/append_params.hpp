// From calls to append_kv and merge to what their kernels are launched with. Pure: needs no driver, so that
// the emulator's tests use it too.
#pragma once

#include "kernels/config/append.hpp"
#include "problem/append_job.hpp"
#include "problem/merge_job.hpp"

namespace tandem::gpu {

Stored stored(DType dtype);

/// Whether every row that the job reads or writes allows the accesses of AppendConfig::vectors.
bool allows_append_vectors(const AppendJob& job);
/// Thread blocks of the launch on a device of so many multiprocessors; 0 if there is nothing to do.
std::int64_t append_grid(const AppendJob& job, int multiprocessors);
AppendParams make_append_params(const AppendJob& job);

bool allows_merge_vectors(const MergeJob& job);
std::int64_t merge_grid(const MergeJob& job, int multiprocessors);
bool same_strides(const Operand& a, const Operand& b);
/// Whether the parts lie at even distances. If not they are merge_most_parts at most.
bool parts_are_even(const MergeJob& job);
MergeParams make_merge_params(const MergeJob& job);

}  // namespace tandem::gpu
