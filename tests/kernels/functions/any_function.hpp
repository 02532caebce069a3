// One emulated kernel for all printed functions: those of this digest pass each call on to the functions that
// `running` names. The text is what a GPU's kernels have; that the compiler cannot see through the calls
// changes no result.
#pragma once

#include <cstdint>

#include "harness/call.hpp"
#include "tile/functions.cuh"

namespace tandem::kernel_tests {

/// A Config of either pass for equal lengths, by lists of blocks.
template <typename Config>
constexpr Config listed(Config c, bool windowed) {
  c.mask = {.causal = windowed, .local = windowed};
  c.functions.block_lists = true;
  return c;
}

/// Printed functions, by address.
struct AnyFunctions {
  std::uint64_t digest;
  void (*row)(void* row, const tile::FunctionSequence& sequence, i32 head, i32 query);
  void (*key)(void* key, const tile::FunctionSequence& sequence, i32 key_position);
  tile::Logit (*pair)(const tile::FunctionSequence& sequence, const void* row, const void* key, float score);
  /// Of a mask function; null without one.
  void (*write_row)(const void* row, i32* values) = nullptr;
  void (*write_key)(const void* key, i32* values) = nullptr;
  Interval (*bounds)(const tile::FunctionSequence& sequence, const Interval* row,
                     const Interval* key) = nullptr;
  /// Where gradients of captured tensors are wanted.
  int gradients = 0;
  bool gradients_read_score = false;
  tile::ElementPattern (*pattern)(int g) = nullptr;
  tile::ElementSlope (*gradient)(const tile::FunctionSequence& sequence,
                                 const CapturedGradient (&gradients)[most_captured], const void* row,
                                 const void* key, float score, int g) = nullptr;
};

/// The printed functions of a digest; null if there are none.
const AnyFunctions* printed_functions(std::uint64_t digest);

/// Those that launches run; set it before one.
extern const AnyFunctions* running;

/// Of a call's functions; backward with the gradients that it asks for.
std::uint64_t digest_of(const harness::Call& call, Pass pass = Pass::forward);

constexpr std::uint64_t any_digest = 1;
constexpr std::size_t kept_bytes = 128;  ///< room for what any of them keeps of a row or a key
constexpr int kept_values = 8;           ///< and for how many integers and booleans of that

}  // namespace tandem::kernel_tests

namespace tandem::tile {

template <>
struct UserFunctions<kernel_tests::any_digest> {
  struct Row {
    alignas(8) char bytes[kernel_tests::kept_bytes];
  };
  using Key = Row;

  static Row row(const FunctionSequence& sequence, i32 head, i32 query) {
    Row made;
    kernel_tests::running->row(made.bytes, sequence, head, query);
    return made;
  }
  static Key key(const FunctionSequence& sequence, i32 position) {
    Key made;
    kernel_tests::running->key(made.bytes, sequence, position);
    return made;
  }
  static Logit pair(const FunctionSequence& sequence, const Row& row, const Key& key, float score) {
    return kernel_tests::running->pair(sequence, row.bytes, key.bytes, score);
  }
  static int gradient_count() { return kernel_tests::running->gradients; }
  static bool gradients_read_score() { return kernel_tests::running->gradients_read_score; }
  static ElementPattern gradient_pattern(int g) { return kernel_tests::running->pattern(g); }
  static ElementSlope gradient(const FunctionSequence& sequence,
                               const CapturedGradient (&gradients)[most_captured], const Row& row,
                               const Key& key, float score, int g) {
    return kernel_tests::running->gradient(sequence, gradients, row.bytes, key.bytes, score, g);
  }
  static constexpr int row_values = kernel_tests::kept_values;
  static constexpr int key_values = kernel_tests::kept_values;
  static void write_row(const Row& row, i32* values) { kernel_tests::running->write_row(row.bytes, values); }
  static void write_key(const Key& key, i32* values) { kernel_tests::running->write_key(key.bytes, values); }
  static Interval bounds(const FunctionSequence& sequence, const Interval* row, const Interval* key) {
    return kernel_tests::running->bounds(sequence, row, key);
  }
};

}  // namespace tandem::tile
