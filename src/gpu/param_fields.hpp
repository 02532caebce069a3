// Fields of kernel Params that forward and backward fill in alike.
#pragma once

#include <algorithm>
#include <array>
#include <climits>
#include <cstdint>

#include "kernels/config/tensor_map_spec.hpp"
#include "kernels/config/types.hpp"
#include "problem/problem.hpp"

namespace tandem::gpu {

inline int as_int(std::int64_t n) {
  return static_cast<int>(std::clamp<std::int64_t>(n, INT_MIN, INT_MAX));
}

/// -1, and what no sequence can reach, is unbounded.
inline int window_of(std::int64_t n) {
  return n < 0 ? INT_MAX : as_int(n);
}

inline Strides strides_of(const Operand& o) {
  return {.batch = o.batch_stride, .row = o.row_stride, .head = o.head_stride};
}

inline LengthArray lengths_of(const Lengths& l) {
  return {.data = l.data, .stride = l.stride, .wide = l.wide};
}

inline std::int64_t blocks_of(std::int64_t rows, int size) {
  return (rows + size - 1) / size;
}

/// Tiles of `size` rows that one head's sequences make. Packed ones end in a tile that is not full, each; the
/// rows before the first and past the last, which belong to none, are two more.
inline std::int64_t tiles_of(std::int64_t rows, int size, std::int64_t batch, bool packed) {
  const std::int64_t blocks = blocks_of(rows, size);
  return packed && blocks > 0 ? blocks + batch + 1 : blocks * batch;
}

/// Whether every row of every head starts at a multiple of 16 bytes and holds whole groups of 8 elements.
inline bool allows_vectors(const Operand& o, std::int64_t head_dim) {
  return reinterpret_cast<std::uintptr_t>(o.data) % 16 == 0 && head_dim % 8 == 0 && o.row_stride % 8 == 0 &&
         o.head_stride % 8 == 0 && o.batch_stride % 8 == 0;
}

/// The same of rows of 8-bit codes, groups of 8.
inline bool allows_code_vectors(const Operand& codes, std::int64_t head_dim) {
  return reinterpret_cast<std::uintptr_t>(codes.data) % 8 == 0 && head_dim % 8 == 0 &&
         (codes.row_stride | codes.head_stride | codes.batch_stride) % 8 == 0;
}

/// A tensor that TMA reads, and its extents.
struct LoadedTensor {
  const Operand& operand;
  std::int64_t head_dim, rows, heads, batch;
};

/// 16 bits an element, or 8 of codes. Dimensions (head_dim, rows, heads, batch), boxes of one strip of
/// columns by `box_rows` rows. An empty tensor is never read, but its map must be valid: it then describes
/// memory about `nearby`.
TensorMapSpec rows_tensor_map(const LoadedTensor& tensor, Element element, int strip, int box_rows,
                              const void* nearby);

}  // namespace tandem::gpu
