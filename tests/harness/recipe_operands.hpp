// What the recipes of docs/numerics.md make of q, k and v, written down a second time: the tests' own
// quantiser, which shares no code with those that it measures.
#pragma once

#include <cstdint>
#include <vector>

#include "problem/problem.hpp"

namespace tandem::harness {

/// One head of one sequence's rows in use, as its quantized values stand for it: value * scale, [row][dim].
/// Where the recipe rotates rows, they are.
struct QuantizedHead {
  std::vector<double> values;
  std::vector<double> scales;    ///< by row: 1 where values are not quantized
  std::vector<float> mean;       ///< by channel: what was taken off; empty if nothing was
  std::vector<float> unrounded;  ///< rows in f32, without the mean and rotated, of tensors in 16 bits
};

enum class Tensor8 { q, k, v };

/// `head` counts the tensor's own heads. Of 16-bit tensors the recipe's scales are by block or row; those of
/// values that the caller brings are the caller's. A row that holds a NaN is NaN wherever the recipe says so.
QuantizedHead quantized_head(const Problem& problem, const Recipe& recipe, Tensor8 which, std::int64_t batch,
                             std::int64_t head);

/// The rotation of a row (docs/numerics.md, step 2) undone, in fp64.
void rotate_back(double* row, std::int64_t dim);

}  // namespace tandem::harness
