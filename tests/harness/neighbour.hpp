// Problems next to a problem, for yardsticks that are not a matter of luck.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "problem/problem.hpp"

namespace tandem::harness {

/// A problem whose q, k, v and dout are copies of another's, every element moved by at most one unit in the
/// last place. What is NaN, infinite or zero stays so. Everything else is shared with the original.
class Neighbour {
 public:
  Neighbour(const Problem& original, std::uint64_t seed);
  [[nodiscard]] const Problem& problem() const { return problem_; }

 private:
  Operand moved(const Operand& x, bool packed, std::int64_t rows, std::int64_t heads, std::int64_t dim);

  Problem problem_;
  std::uint64_t state_;
  std::vector<std::vector<std::byte>> memory_;
};

/// Scores that the softmaxes of a problem are made of: the sum of rows of q times rows of k.
std::int64_t scores(const Problem& problem);

}  // namespace tandem::harness
