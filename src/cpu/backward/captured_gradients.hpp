// Which thread adds to the gradients of what a score function reads, and where, so that bits do not depend on
// threads.
//
// Blocks of queries that may add to the same element are one class, and a class is one thread's from start to
// end: where every read of a tensor has the head as one of its indices, heads are classes of their own, and
// likewise batch entries and blocks of queries. Small tensors, of up to `most_copied` elements, have copies
// in f64, each of a fixed part of the classes, which are added up in their order at the end; they bind no
// blocks together. Large ones are added to where the caller wants them, in f32.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cpu/backward/block.hpp"
#include "problem/problem.hpp"

namespace tandem::cpu {

class CapturedSchedule {
 public:
  CapturedSchedule() = default;
  /// Has neither work nor memory for a problem that wants no such gradients.
  CapturedSchedule(const Problem& p, std::int64_t block_q);

  [[nodiscard]] std::int64_t parts() const { return parts_; }
  [[nodiscard]] std::size_t workspace_bytes() const { return parts_ > 0 ? copy_numbers_ * copies_ * 8 : 0; }

  /// Before all parts. `p` is the problem that the schedule was made of, with all addresses.
  void clear(const Problem& p, double* workspace) const;
  /// Where part `part` adds, by the gradients of the function.
  [[nodiscard]] CapturedGradients targets(const Problem& p, std::int64_t part, double* workspace) const;
  /// After all parts.
  void finish(const Problem& p, const double* workspace) const;

  /// f(batch, query head, block of queries) of the part's blocks, in their order.
  template <typename F>
  void for_each_block(std::int64_t part, F&& f) const {
    for (std::int64_t c = part * classes_ / parts_; c < (part + 1) * classes_ / parts_; ++c) {
      const Range b = range(by_batch_, c / (class_heads_ * class_blocks_), batch_);
      const Range h = range(by_head_, c / class_blocks_ % class_heads_, heads_);
      const Range block = range(by_block_, c % class_blocks_, blocks_);
      for (std::int64_t i = b.first; i < b.last; ++i) {
        for (std::int64_t j = h.first; j < h.last; ++j) {
          for (std::int64_t k = block.first; k < block.last; ++k) f(i, j, k);
        }
      }
    }
  }

 private:
  struct Range {
    std::int64_t first, last;
  };
  static Range range(bool apart, std::int64_t of_class, std::int64_t all) {
    return apart ? Range{of_class, of_class + 1} : Range{0, all};
  }

  std::int64_t batch_ = 0, heads_ = 0;
  std::int64_t blocks_ = 0;  ///< blocks of queries that a sequence has at most
  bool by_batch_ = true, by_head_ = true, by_block_ = true;
  std::int64_t class_heads_ = 1, class_blocks_ = 1;
  std::int64_t classes_ = 0;
  std::int64_t parts_ = 0;
  std::size_t copies_ = 0;
  std::size_t copy_numbers_ = 0;                                ///< f64 numbers in a copy
  std::array<std::int64_t, Function::max_captured> copy_at_{};  ///< a tensor's place in a copy; -1: none
};

}  // namespace tandem::cpu
