// Extents of quantized values and scales in a quantised call, as quantized_layout.hpp has them: what the
// quantiser writes by and the 8-bit kernel reads by.
#pragma once

#include "problem/problem.hpp"
#include "problem/quantized_layout.hpp"
#include "problem/recipe.hpp"

namespace tandem::gpu {

/// Extents of q, or of k and v.
struct QuantizedAxes {
  std::int64_t entries;  ///< batch entries that the tensors have: one of packed sequences
  std::int64_t heads;
  std::int64_t rows;
  std::int64_t blocks;  ///< blocks of quant_block rows, of all sequences of an entry
};
inline QuantizedAxes query_axes(const Problem& p) {
  return {p.packed_q ? 1 : p.batch, p.heads_q, p.rows_q, quantized_blocks(p.rows_q, p.batch, p.packed_q)};
}
inline QuantizedAxes key_axes(const Problem& p) {
  return {p.packed_k ? 1 : p.batch, p.heads_kv, p.rows_k, quantized_blocks(p.rows_k, p.batch, p.packed_k)};
}

/// Scales of a head, one a row (up to its last block's end) or one a block.
inline std::int64_t scales_of_head(const QuantizedAxes& axes, bool by_row) {
  return by_row ? axes.blocks * quant_block : axes.blocks;
}
inline ScaleStrides scale_strides(const QuantizedAxes& axes, bool by_row) {
  const std::int64_t groups = scales_of_head(axes, by_row);
  return {.batch = axes.heads * groups, .head = groups, .group = 1};
}

}  // namespace tandem::gpu
