// Functions on scores, and masks, that are tested: those that are published, each by its usual name, and
// those with which single tests ask for what a function may do. The emulator's kernels are compiled with them
// all.
#pragma once

#include <string>
#include <vector>

#include "harness/call.hpp"

namespace tandem::harness {

/// A function by its usual name, with what it reads.
struct Named {
  std::string name;
  std::string score;
  std::string mask;
  std::vector<Captured> captured = {};
};

/// Of plain_case (contract.hpp): 2 sequences of 75 queries and 139 keys, 4 query heads.
std::vector<Named> published_masks();
std::vector<Named> published_scores();
/// Some of the published functions, none of which reads by position in a dense tensor.
std::vector<Named> crossed_functions();

/// Makes `value` ("nan", "inf", "1e30" or "-inf") of what the mask hides, and of what causal hides.
Named value_of_masked(const std::string& value);
Named value_of_causal(const std::string& value);
/// A NaN for one visible pair.
Named one_nan();
/// Hides every ninth key.
Named hidden_keys();
/// Hide the first 33 queries from all keys: by -inf, or by the mask.
Named blind_by_score();
Named blind_by_mask();
/// The same, beside a bias that has a gradient.
Named gradient_of_blind_rows();

/// Score functions of every way in which an element can be chosen and enter the logit.
std::vector<Named> differentiated_functions();
/// Of tensors that are too large for the CPU's copies: those whose reads have heads, batch entries or queries
/// as indices, and those that all blocks of queries add to.
std::vector<Named> large_functions();
/// The numbers of a function's tensors of reals: those whose gradients a call may ask for.
std::vector<int> real_captured(const Named& function);

/// All of them.
std::vector<Named> tested_functions();

}  // namespace tandem::harness
