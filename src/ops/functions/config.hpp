// What host and device share of the caller's functions on scores: which ones a kernel is compiled with, and
// the tensors that they read. Plain aggregates, as in config/types.hpp.
#pragma once

namespace tandem {

/// The functions of a kernel, and what else is asked of every pair. Their text is no part of a Config:
/// gpu/function_source prints it as tile::UserFunctions<digest> behind the kernel's source.
struct Functions {
  unsigned long long digest = 0;  ///< digest of both; 0: there is none, and no dropout
  bool score_function = false;    ///< from the scaled and capped score to the logit
  bool mask_function = false;     ///< which pairs are visible, of those that the window leaves
  bool block_lists = false;       ///< a tile visits the blocks that a kernel has listed for it before
  bool dropout = false;           ///< clears entries of P
  bool dropout_places = false;    ///< by their places in sequences of which the call has rows
  /// Backward: adds up gradients of what the score function reads; launched with WithCapturedGradients.
  bool captured_gradients = false;

  constexpr bool operator==(const Functions&) const = default;
  [[nodiscard]] constexpr bool given() const { return digest != 0; }
  /// Whether they may hide pairs: what a query sees is known of each pair alone.
  [[nodiscard]] constexpr bool hide() const { return score_function || mask_function; }
};

/// A tensor that functions read.
struct CapturedTensor {
  const void* data;
  long long strides[4];  ///< bytes
  int last[4];           ///< the largest index of each dimension
};

/// Tensors that one function may capture.
constexpr int most_captured = 16;

/// A number of a function that its kernel's text does not have.
union FunctionNumber {
  float real;
  int integer;
};
constexpr int most_numbers = 32;

/// The key blocks of which a tile of queries sees any pair, or in the backward pass the query blocks of a
/// tile of keys: a count, and behind it for each block, from the first on, twice its number, and 1 more if
/// the mask function hides none of its pairs.
struct BlockLists {
  unsigned int* data;
  long long batch_stride;  ///< 0 where the mask function does not depend on it
  long long head_stride;
  int stride;  ///< from tile to tile
  int heads;   ///< that have lists of their own
};

/// problem/dropout.hpp has what they mean.
struct DropoutParams {
  unsigned int threshold;
  float scale;
  unsigned int key[2];
  unsigned int offset;
  unsigned int heads;
  const int* places;  ///< four of each batch entry (DropoutPlace), read if the Config says so
  long long place_stride;
};

struct FunctionParams {
  CapturedTensor tensors[2 * most_captured];  ///< the score function's; the mask function's second half
  BlockLists lists;                           ///< read if the Config says so
  DropoutParams dropout;
  FunctionNumber numbers[most_numbers];  ///< by gpu/function_numbers
  float reciprocals[most_numbers];       ///< reciprocals of the real ones
};

/// Threads of a CTA of the kernels that make lists, one for each tile: groups of as many as a tile may have
/// rows (or keys). They look at so many blocks at a time, of each of which a warp has a word in shared
/// memory.
constexpr int list_threads = 512;
constexpr int list_rows = 128;
constexpr int list_chunk = 128;
constexpr int list_shared_bytes = 4 * list_chunk * (list_threads / 32 + 1);

/// What a kernel with functions is launched with.
template <typename Params>
struct WithFunctions : Params {
  FunctionParams functions;
};

/// Where the gradient of a captured tensor goes: f32 of the tensor's shape.
struct CapturedGradient {
  float* data;           ///< null: not wanted
  long long strides[4];  ///< bytes
};

/// What a backward kernel that adds to such gradients is launched with: by the numbers of the score
/// function's tensors.
template <typename Params>
struct WithCapturedGradients : Params {
  CapturedGradient gradients[most_captured];
};

/// The kernel that clears them first: a grid of CTAs divides the elements of each.
struct ClearParams {
  CapturedGradient gradients[most_captured];
  int extents[most_captured][4];  ///< 1 past the rank
  long long counts[most_captured];
};
constexpr int clear_threads = 256;

}  // namespace tandem
