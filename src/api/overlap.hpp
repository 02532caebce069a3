// Do two strided tensors share memory? Decided for their elements, not for the ranges of bytes that they lie
// in: slices of one buffer whose elements alternate share nothing.
#pragma once

#include <cstdint>

#include "tandem/tensor.hpp"

namespace tandem::check {

/// The bytes that a tensor lies within, one past the last included.
struct ByteRange {
  std::uintptr_t low = 0;
  std::uintptr_t high = 0;
  [[nodiscard]] bool meets(const ByteRange& other) const { return low < other.high && other.low < high; }
};

/// For a tensor that has an address and elements, and whose extent was checked.
ByteRange bytes_of(const ConstTensor& t);

/// True if an element of `x` and an element of `y` have a byte in common. Both are as for bytes_of. Exact for
/// all slices, transposes, permutations and expansions of one buffer; where the strides of two tensors are
/// so unrelated that `most_steps` of the search do not settle it, the answer is true.
bool share_memory(const ConstTensor& x, const ConstTensor& y);
constexpr int most_steps = 10'000;

}  // namespace tandem::check
