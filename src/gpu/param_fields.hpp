// Fields of kernel Params that forward and backward fill in alike, and the tensors that both load.
#pragma once

#include <algorithm>
#include <array>
#include <climits>
#include <cstdint>
#include <numeric>
#include <optional>

#include "config/tensor_map_spec.hpp"
#include "config/types.hpp"
#include "gpu/workspace.hpp"
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

/// Rows that a box of pages has: as many as page and block of keys have in common, so that none crosses the
/// edge of either; behind padding, whose size the device alone knows, one.
inline int page_box_rows(const Problem& p, int block_n) {
  return p.leftpad_k.given() ? 1 : static_cast<int>(std::gcd(p.pages.page_size, std::int64_t{block_n}));
}

/// `block_n`: the keys that are loaded at once.
inline PageTable page_table_of(const Problem& p, int block_n) {
  const Pages& pages = p.pages;
  return {.data = pages.table,
          .batch_stride = pages.batch_stride,
          .stride = pages.stride,
          .count = as_int(pages.count),
          .page_size = as_int(pages.page_size),
          .box_rows = page_box_rows(p, block_n),
          .wide = pages.wide};
}

inline std::int64_t blocks_of(std::int64_t rows, std::int64_t size) {
  return (rows + size - 1) / size;
}

/// Tiles of `size` rows that one head's sequences make. Packed ones end in a tile that is not full, each; the
/// rows before the first and past the last, which belong to none, are two more.
inline std::int64_t tiles_of(std::int64_t rows, std::int64_t size, std::int64_t batch, bool packed) {
  const std::int64_t blocks = blocks_of(rows, size);
  return packed && blocks > 0 ? blocks + batch + 1 : blocks * batch;
}

/// Whether every row of every head starts at a multiple of 16 bytes and holds whole groups of 8 elements.
inline bool allows_vectors(const Operand& o, std::int64_t head_dim) {
  return reinterpret_cast<std::uintptr_t>(o.data) % 16 == 0 && head_dim % 8 == 0 && o.row_stride % 8 == 0 &&
         o.head_stride % 8 == 0 && o.batch_stride % 8 == 0;
}

/// Whether every row of every head starts at a multiple of 4 bytes and holds whole pairs of elements.
inline bool allows_pairs(const Operand& o, std::int64_t head_dim) {
  return reinterpret_cast<std::uintptr_t>(o.data) % 4 == 0 && head_dim % 2 == 0 && o.row_stride % 2 == 0 &&
         o.head_stride % 2 == 0 && o.batch_stride % 2 == 0;
}

/// Whether every row of 8-bit values starts at a multiple of `bytes`, a power of two, and holds whole groups.
inline bool allows_quantized_vectors(const Operand& x, std::int64_t head_dim, unsigned int bytes = 8) {
  return reinterpret_cast<std::uintptr_t>(x.data) % bytes == 0 && head_dim % bytes == 0 &&
         (x.row_stride | x.head_stride | x.batch_stride) % bytes == 0;
}

/// The tensors that TMA reads; dout in backward alone.
enum class Loaded : int { q, k, v, dout };
constexpr std::size_t loaded_count = 4;
constexpr std::size_t index_of(Loaded which) {
  return static_cast<std::size_t>(which);
}

inline const Operand& operand_of(const Problem& p, Loaded which) {
  constexpr Operand Problem::*operands[] = {&Problem::q, &Problem::k, &Problem::v, &Problem::dout};
  return p.*operands[index_of(which)];
}
inline Operand& operand_of(Problem& p, Loaded which) {
  return const_cast<Operand&>(operand_of(static_cast<const Problem&>(p), which));
}

/// A tensor that TMA reads, and its extents.
struct LoadedTensor {
  const Operand& operand;
  std::int64_t head_dim, rows, heads, batch;

  [[nodiscard]] bool empty() const { return rows == 0 || heads == 0 || batch == 0 || !operand.given(); }
};
LoadedTensor loaded_tensor(const Problem& problem, Loaded which);

/// 16 bits an element, or 8 of quantized values. Dimensions (head_dim, rows, heads, batch), boxes of one
/// strip of columns by `box_rows` rows. An empty tensor is never read, but its map must be valid: it then
/// describes memory about `nearby`.
TensorMapSpec rows_tensor_map(const LoadedTensor& tensor, Element element, int strip, int box_rows,
                              const void* nearby);

/// The map of a tensor that a kernel loads. Where it lies in the workspace, in `region`, the base is any
/// address until place().
struct LoadedMap {
  TensorMapSpec spec;
  Region region = Region::none;
};
/// By Loaded, of the tensors that the kernel loads.
using LoadedMaps = std::array<std::optional<LoadedMap>, loaded_count>;

/// The region of a tensor's copy.
constexpr Region copy_of(Loaded which) {
  return static_cast<Region>(static_cast<int>(Region::q) + static_cast<int>(which));
}
static_assert(copy_of(Loaded::q) == Region::q && copy_of(Loaded::dout) == Region::dout);

/// Gives `maps` the addresses that regions have in `memory`.
void place(LoadedMaps& maps, const Workspace& workspace, char* memory);

}  // namespace tandem::gpu
