// 16-bit (or f32) queries on 8-bit keys and values: which of them become a copy in the queries' dtype first,
// and that copy. Its elements are quantized value * scale in f32, rounded once more to that dtype.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/effective.hpp"

namespace tandem {

/// e4m3 queries on e4m3 keys and values by the exact formula: a GPU makes 16-bit queries of them first.
inline bool has_exact_quantized_inputs(const Problem& p) {
  return p.quantized_inputs() && p.precision == Precision::exact;
}

/// Scales by row are addressed as the rows of k and v are (key_place), in a cache too.
inline bool is_by_row(const Scales& s) {
  return s.data != nullptr && s.group == ScaleGroup::row;
}
inline bool has_row_scales(const Problem& p) {
  return is_by_row(p.k_scale) || is_by_row(p.v_scale);
}
/// Scales by block go into a copy in the queries' dtype.
inline bool has_block_scales(const Problem& p) {
  return p.k_scale.group == ScaleGroup::block || p.v_scale.group == ScaleGroup::block;
}
/// Whether k or v has scales that only a copy in the queries' dtype can bring into the products: by block or
/// row, and not of a cache. Others are factors of the logits, of P and of out: the CPU's kernels then convert
/// the 8-bit values, which every dtype has, on their way into products.
inline bool has_fine_scales(const Problem& p) {
  return !p.of_cache() && (has_block_scales(p) || has_row_scales(p));
}
/// What the scales of K or V of (batch, kv head) have in common: 1 where they are by row.
inline float common_scale(const Scales& s, std::int64_t batch, std::int64_t kv_head) {
  return is_by_row(s) ? 1.0F : s.at(batch, kv_head);
}

/// Where K and V lie in scratch memory: [batch, or 1 if packed][kv head][row][pitch], 256-byte aligned.
struct MixedSpace {
  std::int64_t k_pitch = 0;  ///< elements from row to row: the head dimension in whole groups of 8
  std::int64_t v_pitch = 0;
  std::size_t v = 0;  ///< K is at 0
  std::size_t bytes = 0;
};

inline MixedSpace mixed_space(const Problem& p) {
  constexpr std::size_t alignment = 256;
  const std::int64_t rows = (p.packed_k ? 1 : p.batch) * p.heads_kv * p.rows_k;
  const auto pitch = [](std::int64_t head_dim) { return (head_dim + 7) / 8 * 8; };
  const auto bytes = [&](std::int64_t columns) {
    return (static_cast<std::size_t>(rows * columns) * size_of(p.q.dtype) + alignment - 1) / alignment *
           alignment;
  };
  MixedSpace s{.k_pitch = pitch(p.head_dim_qk), .v_pitch = pitch(p.head_dim_v)};
  s.v = bytes(s.k_pitch);
  s.bytes = s.v + bytes(s.v_pitch);
  return s;
}

/// The problem with K and V in the dtype of Q in place of the quantized values, laid out as mixed_space says.
/// A plan does not know the workspace yet: they have an address that is never read.
inline Problem dequantized(const Problem& problem) {
  const MixedSpace space = mixed_space(problem);
  Problem p = problem;
  const auto operand = [&p](std::int64_t pitch) {
    return Operand{.data = const_cast<std::byte*>(&nowhere),
                   .dtype = p.q.dtype,
                   .batch_stride = p.packed_k ? 0 : p.heads_kv * p.rows_k * pitch,
                   .row_stride = pitch,
                   .head_stride = p.rows_k * pitch};
  };
  p.k = operand(space.k_pitch);
  p.v = operand(space.v_pitch);
  p.k_scale = p.v_scale = {};
  return p;
}
/// Sets the addresses of K and V, in `memory`, of a problem that dequantized() gave.
inline void place_dequantized(Problem& problem, std::byte* memory) {
  problem.k.data = memory;
  problem.v.data = memory + mixed_space(problem).v;
}

}  // namespace tandem
