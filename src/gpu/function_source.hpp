// A call's functions on scores as the GPU kernels have them: their digest, their CUDA text, and what the
// tensors that they read become among a kernel's parameters.
#pragma once

#include <optional>
#include <string>

#include "config/types.hpp"
#include "ops/functions/config.hpp"
#include "problem/problem.hpp"

namespace tandem::gpu {

/// The functions of a call, and its dropout; null of those that it has not.
struct CallFunctions {
  const Function* score = nullptr;
  const Function* mask = nullptr;
  const Dropout* dropout = nullptr;
  std::uint32_t gradients = 0;  ///< backward: a bit for each tensor of `score` whose gradient is wanted
  [[nodiscard]] bool given() const { return score != nullptr || mask != nullptr || dropout != nullptr; }
};
CallFunctions functions_of(const Problem& problem);

/// What a kernel's Config says of them. Two calls have the same digest if their text is the same; it depends
/// on the types and ranks of captured tensors, and whether strides have more than 32 bits, not on their sizes
/// or memory, nor on numbers that are parameters (gpu/function_numbers). Allocates nothing.
Functions functions_config(const CallFunctions& functions);

/// The text that stands behind a kernel's source: tile::UserFunctions of the digest. Empty without functions
/// and dropout.
std::string function_source(const CallFunctions& functions);

/// How many operations a kernel has for every pair of query and key, derivatives included, an exponential or
/// its like for three; nothing if it reads an element by query, or by query and key, for each.
std::optional<int> operations_of_pairs(const CallFunctions& functions);
/// Whether so many leave the kernels nearly as many registers as none.
constexpr bool are_light(std::optional<int> operations) {
  return operations.has_value() && *operations <= 12;
}

/// What the text reads at run time.
FunctionParams function_params(const CallFunctions& functions);

/// Where the kernels add up the gradients of captured tensors: the caller's own memory.
void set_captured_gradients(const Problem& problem, CapturedGradient (&gradients)[most_captured]);
/// Parameters of the kernel that clears those gradients beforehand, with the elements of each.
ClearParams make_clear_params(const Problem& problem);
/// Its grid: enough CTAs for the largest, up to some for each SM.
std::int64_t clear_grid(const Problem& problem, int multiprocessors);

/// The lists of blocks of a call with a mask function, of equal lengths: where they lie, in memory that
/// is yet to come, and how many there are.
struct ListedBlocks {
  BlockLists lists;
  std::int64_t count = 0;
  [[nodiscard]] std::int64_t bytes() const { return count * lists.stride * 4; }
};
/// The forward pass's lists: for each tile of queries the key blocks that it sees.
ListedBlocks listed_blocks(const Problem& problem, const Tiling& tiling);
/// The backward pass's lists: for each tile of keys the query blocks that see it.
ListedBlocks listed_query_blocks(const Problem& problem, int tile_keys, int block_m);

}  // namespace tandem::gpu
