// The accuracy rule on a sample of a call's results, for calls that are too long for the oracle. Free of any
// test framework: `tandem bench` checks its cells by it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "accuracy.hpp"

namespace tandem::harness {

/// Rows of one head of one sequence: of q as queries, of k and v as keys.
struct Part {
  std::int64_t batch = 0;
  std::int64_t head = 0;  ///< of q; its keys are those of head / group
  std::int64_t first = 0;
  std::int64_t count = 0;
};

/// The last (batch, head) and a random one; of each the first rows, the last, and two blocks of rows between.
/// All rows where they are few. The same for a seed.
std::vector<Part> sample_parts(const Problem& problem, std::uint64_t seed);

/// How far a sample of one output is from what it should be.
struct SampleError {
  const char* output = "";
  Deviation deviation;
  Bound bound;
  std::string worst;  ///< where: "batch 0, row 17, head 3, element 5"; empty if all are exact
};

/// What `problem.out` and `problem.lse` hold (forward), or dq, dk and dv (backward), compared on `parts` by
/// the rule of expect(); the sample has one bound an output, as a whole tensor has, and one RMS and gain.
/// `dtype` is that of the outputs. The rows of a part take their own q and the head's k and v: the time grows
/// with seqlen, not with its square. Keys' gradients take every query's LSE and row sum of dout * out, from
/// `problem`: check forward first. For masks that are full or causal, dense tensors, and no softcap, sink or
/// dlse.
std::vector<SampleError> compare_sample(const Problem& problem, DType dtype, Pass pass,
                                        const std::vector<Part>& parts);

}  // namespace tandem::harness
