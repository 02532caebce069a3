// Checks of what cu_seqlens, seqused, page tables and the other integers of a cache contain. Called for
// options.check alone, since the backends clamp whatever they find, and reading device memory waits for the
// device.
#pragma once

#include <list>
#include <vector>

#include "problem/problem.hpp"

namespace tandem::check {

/// Offsets, the argument `name`, ascend from 0 to at most `rows`, which is called `rows_name`.
void offsets(const char* name, const Lengths& cu_seqlens, std::int64_t batch, std::int64_t rows,
             const char* rows_name);

/// Each of the argument `name` is at most the length of its sequence.
void used(const char* name, const Lengths& seqused, const Lengths& cu_seqlens, std::int64_t batch,
          std::int64_t rows);

/// Integers of a device, copied to the host for the life of this.
class HostCopies {
 public:
  explicit HostCopies(int device_index) : device_index_(device_index) {}

  /// `lengths`, if given, become those of a copy of their first `count`.
  void take(Lengths& lengths, std::int64_t count);
  void take(Pages& pages, std::int64_t batch);

 private:
  int device_index_;
  std::list<std::vector<std::int64_t>> values_;  ///< a list, whose elements stay where they are
};

/// cu_seqlens ascend from 0 to at most the rows of their tensor; seqused is at most the length of its
/// sequence, leftpad_k at most its rows; entries of a cache and pages of rows in use exist.
void lengths_contents(const Problem& problem);

}  // namespace tandem::check
