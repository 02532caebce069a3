// What host and device share of the forward kernel on quantized values (8 bits): its Config and Params. Plain
// aggregates: the same file is compiled by the host compiler and by NVRTC.
#pragma once

#include "ops/forward/config.hpp"
#include "problem/quantized_layout.hpp"

namespace tandem {

/// The order of work in the 8-bit forward kernel.
struct EightBitSchedule {
  bool dynamic = false;  ///< dynamic persistent scheduler: CTAs take tiles from a counter; else static
  bool overlap = true;   ///< softmax of one block runs under the products of the next, in one warpgroup
  bool pingpong = true;  ///< one warpgroup's softmax runs under the products of the others

  constexpr bool operator==(const EightBitSchedule&) const = default;
};

/// Everything that specialises the 8-bit forward kernel.
struct EightBitConfig {
  Tiling tiling{};  ///< head dimensions: multiples of 32; block_n: quant_block, so that a block has one scale
  OperandType qk = OperandType::e4m3;
  OperandType pv = OperandType::e4m3;
  int stages = 2;    ///< K tiles, and V tiles, in flight
  int q_stages = 1;  ///< 2: the next tile's Q comes in while this tile's is still read
  Mask mask{};
  bool row_scales = false;    ///< Q and K have one a row; else one a block (or a larger group)
  bool v_row_scales = false;  ///< V has one a row, which multiplies P
  bool rotated_v = false;     ///< V is rotated (Hadamard), which is undone on the rows of O
  int slices = 2;             ///< P V is computed and promoted by so many column ranges of V, in sequence

  /// Half of P's exponentials are linear within an octave (takes_linear_exp2; e4m3, scales by block).
  bool linear_exp2 = false;

  /// Q, K, V and all scales are read where the caller has them (e4m3, scales by block or larger), and the
  /// kernel transposes each block of V once. Else all are arranged in the workspace before, where values take
  /// the signs of their scales.
  bool in_place = false;
  ScoreTransform transform = ScoreTransform::raw;
  EightBitSchedule schedule{};

  constexpr bool operator==(const EightBitConfig&) const = default;
  [[nodiscard]] constexpr int consumers() const { return tiling.block_m / 64; }
  [[nodiscard]] constexpr int threads() const { return 128 * (consumers() + 1); }
  [[nodiscard]] constexpr RegisterSplit registers() const { return split_registers(consumers()); }
  /// Lazy rescaling: the exponent's reference moves only when P grows too large. It needs a P in floating
  /// point, which has room above 1; integers have none, and scales by row of V differ by more.
  [[nodiscard]] constexpr bool lazy_rescaling() const { return pv != OperandType::s8 && !v_row_scales; }
  [[nodiscard]] constexpr bool v_has_zero_point() const {
    return takes_zero_point(pv, v_row_scales, tiling.head_dim_v);
  }
  /// A tile's sums and weight are found under its own products. With ping-pong, or where products and softmax
  /// follow each other, that was slower.
  [[nodiscard]] constexpr bool adds_late() const {
    return !lazy_rescaling() && !v_row_scales && schedule.overlap && !schedule.pingpong;
  }
  /// A slice of P V is in flight while the one before it is promoted, where registers hold both sums.
  [[nodiscard]] constexpr bool slices_overlap() const {
    return lazy_rescaling() && !schedule.overlap && slices >= 2 && slice_columns() <= 64;
  }
  /// With lazy rescaling: a block's P V ends before the next block's scores begin.
  [[nodiscard]] constexpr bool in_order() const {
    return lazy_rescaling() && (mask.causal || slice_columns() > 64 || slices_overlap()) &&
           !schedule.overlap && !schedule.pingpong;
  }
  /// Consumers locate their tiles themselves, where places that the producer hands over would spill.
  [[nodiscard]] constexpr bool by_number() const { return pv == OperandType::s8 || mask.varlen; }
  /// Columns of V in a slice of P V.
  [[nodiscard]] constexpr int slice_columns() const { return tiling.head_dim_v / slices; }
};

/// Columns of a strip of a tile of 8-bit values: 128 where that wastes less than a strip of 64 costs.
constexpr int byte_strip_columns(int cols) {
  return cols % 128 == 0 || cols == 96 ? 128 : 64;
}
/// Bytes of a row of such a tile.
constexpr int byte_tile_columns(int cols) {
  return (cols + byte_strip_columns(cols) - 1) / byte_strip_columns(cols) * byte_strip_columns(cols);
}

/// Warps of the producer's warpgroup that transpose V in place: all but the loader's. Each has a strip of so
/// many columns of a block of keys at a time, 8 KB as rows and 8 KB transposed.
constexpr int transposing_warps = 3;
constexpr int value_strip_columns = 64;
/// Strips of a block, of which the last may be narrower.
constexpr int value_strips(int head_dim_v) {
  return (head_dim_v + value_strip_columns - 1) / value_strip_columns;
}

/// Dynamic shared memory of the 8-bit forward kernel: the tiles of Q, K and V, K's and V's scales by row, the
/// pairs of 8-byte barriers, and a ring of two tiles.
constexpr int eight_bit_shared_bytes(const EightBitConfig& c) {
  const int q_tiles = c.q_stages * c.tiling.block_m * byte_tile_columns(c.tiling.head_dim_qk);
  const int kv_tiles =
      c.stages * quant_block * (byte_tile_columns(c.tiling.head_dim_qk) + c.tiling.head_dim_v);
  const int scales = 4 * quant_block * c.stages * ((c.row_scales ? 1 : 0) + (c.v_row_scales ? 1 : 0));
  const int block_scales = 8 * c.stages;
  const int strips = c.in_place ? transposing_warps * (2 * quant_block * value_strip_columns + 8) : 0;
  const int barriers = 16 * (2 * c.stages + c.q_stages * c.consumers());
  return (q_tiles + kv_tiles + strips + scales + block_scales + barriers + 144 + 1023) / 1024 * 1024;
}

/// V of the caller's, transposed by the kernel that reads it. All counts are 0 before the launch.
struct TransposedValues {
  unsigned char* data;    ///< V's tiles as shared memory has them, by (batch entry, KV head, block)
  unsigned int* claimed;  ///< units of work that CTAs have claimed
  unsigned int* heads;    ///< strips that are in `data`, by (sequence, KV head)
  unsigned int* blocks;   ///< the same by (batch entry, KV head, block)
  int axis_blocks;        ///< blocks of a batch entry's head (quantized_layout.hpp)
};

/// What the 8-bit forward kernel is launched with. In `forward`, q, k and v are maps of quantized values: q
/// and k with dimensions (head_dim, rows, heads, batch), v with (padded keys, head_dim_v, heads, batch);
/// scale is not negative. In place all three are as the caller has them, (head_dim, rows, heads, batch), and
/// so are the scales: null data stands for 1, and any of them may be negative, the softmax's too.
template <typename Forward>
struct EightBitParamsOf {
  Forward forward;
  ScaleArray q_scales;
  ScaleArray k_scales;
  ScaleArray v_scales;
  ScaleArray shift;             ///< null data: none
  int q_scale_heads;            ///< query heads that share one of q's (in place)
  TransposedValues transposed;  ///< in place
};
using EightBitParams = EightBitParamsOf<ForwardParams>;
/// Where Tiling::max_logits is set.
using EightBitParamsWithMaxima = EightBitParamsOf<ForwardParamsWithMaxima>;

}  // namespace tandem
