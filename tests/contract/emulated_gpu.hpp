// The contract's tests with the emulated GPU as the only backend. A case runs if it is small, a kernel was
// compiled for it and two of its features have not met in its test yet (harness/pairwise.hpp); what comes
// back is checked as everywhere.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "backward/emulated_backward.hpp"
#include "eight_bit_backward/emulated_eight_bit_backward.hpp"
#include "forward/emulated_forward.hpp"

namespace tandem::kernel_tests {

/// The kernels of a GPU, by the calls that they are for.
struct EmulatedKernels {
  std::string name;
  std::vector<std::span<const EmulatedForward>> whole;        ///< any call, a tile a CTA
  std::vector<std::span<const EmulatedForward>> sharing;      ///< few queries, whose keys CTAs share
  std::vector<std::span<const EmulatedForward>> grouped;      ///< few queries of grouped heads
  std::vector<std::span<const EmulatedForward>> decoding;     ///< those that 16 rows hold
  std::vector<std::span<const EmulatedForward>> wide;         ///< heads of more than 256 dimensions
  std::vector<std::span<const EmulatedForward>> listed = {};  ///< functions on equal lengths
  std::vector<std::span<const EmulatedForward>> maxima = {};  ///< calls with max_logits
  std::string without = {};  ///< tests of what they cannot do: ":Suite.Test:..."
  std::vector<std::span<const EmulatedBackward>> backward =
      {};  ///< gradients; those that none takes are counted
  std::vector<std::span<const EmulatedEightBitBackward>> eight_bit_backward = {};
};

/// What main() returns.
int run_contract(int argc, char** argv, const EmulatedKernels& kernels);

}  // namespace tandem::kernel_tests
