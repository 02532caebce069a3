// What the 8-bit driver (forward.cpp) hands to its kernels (quantize/kernel.cpp,
// kernel.cpp): plain numbers and pointers, as in forward/tile.hpp.
#pragma once

#include "cpu/forward/tile.hpp"
#include "problem/recipe.hpp"

namespace tandem::cpu {

/// Up to quant_block rows of one head, as the user has them, and what is done to them before they are
/// rounded.
struct QuantizeRows {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride = 0;  ///< elements from row to row
  int rows = 0;
  int dim = 0;
  const float* mean = nullptr;  ///< by channel, subtracted; may be null
  bool rotate = false;
  float* scratch = nullptr;  ///< rows * dim
};

/// How they are rounded, and where quantized values and scales go: element = quantized value * scale.
struct QuantizeTo {
  OperandType type = OperandType::e4m3;  ///< e4m3 or s8
  ScaleGroup group = ScaleGroup::block;
  float largest = 0.0F;  ///< tensor and head: the largest magnitude of the group
  std::uint8_t* out = nullptr;
  std::int64_t out_stride = 0;
  float* scales = nullptr;  ///< channel: one a channel; else one a row, equal where rows share it
  /// s8, groups larger than a row: rows that hold a NaN or an infinity are marked (nan_marker), and their
  /// scale is negative; else NaN is the scale of all of the group.
  bool nan_markers = false;
};

/// The quantiser for one instruction set. NaN and infinity count for no scale and no mean.
struct QuantizeKernel {
  /// sums[c] += the rows' finite elements of channel c, in an order that is the same everywhere.
  void (*sum_channels)(const QuantizeRows& rows, float* sums) = nullptr;
  /// The largest finite magnitude after mean and rotation.
  float (*largest)(const QuantizeRows& rows) = nullptr;
  void (*quantize)(const QuantizeRows& rows, const QuantizeTo& to) = nullptr;
};

/// Bytes of a key or of a value. On a matrix unit quantized values of a block lie in tiles of 16 rows of 64
/// bytes: K's of 16 keys, [key / 16][channel / 64], and V's of 16 columns, [key / 64][column / 16]; with
/// zeros up to whole tiles, of V 32 columns.
[[gnu::always_inline]] inline std::int64_t key_bytes(std::int64_t head_dim_qk, bool on_unit) {
  return on_unit ? (head_dim_qk + 63) / 64 * 64 : head_dim_qk;
}
[[gnu::always_inline]] inline std::int64_t value_bytes(std::int64_t head_dim_v, bool on_unit) {
  return on_unit ? in_tiles(static_cast<int>(head_dim_v)) : head_dim_v;
}

/// Up to block_q queries of one head against the keys they see; block_q is quant_block, on a matrix unit
/// maybe more.
struct EightBitTile {
  ForwardTile
      forward;  ///< group 1; k is unused, v read where PV is in 16 bits; scratch as eight_bit_scratch says
  Recipe recipe;
  bool on_unit = false;                       ///< products are those of a matrix unit
  float q_largest = 0.0F;                     ///< scale groups tensor and head: the largest |q|
  const float* q_scales = nullptr;            ///< where q is quantized: its first row's
  std::int64_t q_scale_stride = 0;            ///< from row to row, within a block of quant_block rows
  std::int64_t q_scale_stride_blocks = 0;     ///< from block to block
  const float* mean = nullptr;                ///< K's mean by channel, where it was removed
  const std::uint8_t* k_quantized = nullptr;  ///< [seqlen_k][key_bytes], on a matrix unit blocks of that
  const float* k_scales = nullptr;            ///< [seqlen_k], negative for a marked row
  const std::uint8_t* v_quantized = nullptr;  ///< [seqlen_k][value_bytes], on a matrix unit blocks of that
  const float* v_scales = nullptr;            ///< channel: [blocks][head_dim_v]; else [seqlen_k]
};

/// A caller-supplied row of quantized values, and its scale, which loses its sign to the values: on a GPU
/// scales have none. -128, which s8 has no other sign of, becomes 127.
[[gnu::always_inline]] inline void copy_quantized(const std::uint8_t* from, OperandType type,
                                                  std::int64_t dim, float scale, std::uint8_t* to,
                                                  float& stored) {
  stored = __builtin_fabsf(scale);  // of -0, too: a sign that is left marks the row
  for (std::int64_t c = 0; c < dim; ++c) {
    const std::uint8_t code = from[c];
    const int other = type == OperandType::e4m3 ? code ^ 0x80 : code == 0x80 ? 0x7F : -code;
    to[c] = scale < 0.0F ? static_cast<std::uint8_t>(other) : code;
  }
}

/// The pieces of a thread's scratch memory, as offsets in floats.
struct EightBitScratch {
  std::size_t q = 0;          ///< [stripe][head_dim_qk][lanes], on a matrix unit four channels a word
  std::size_t out = 0;        ///< [stripe][head_dim_v][lanes], f32 sums
  std::size_t held = 0;       ///< likewise, sums not promoted yet; none on a matrix unit
  std::size_t scores = 0;     ///< [key][lanes] of one stripe; on a matrix unit P behind them
  std::size_t k = 0;          ///< a block's decoded K, the quantiser's rows, and rows of out
  std::size_t v = 0;          ///< a block's decoded V, on a matrix unit K's or V's values by row
  std::size_t quantized = 0;  ///< Q's values of quant_block rows, in bytes
  std::size_t channels = 0;   ///< two arrays by channel of V
  std::size_t rows = 0;       ///< eight arrays by query row
  std::size_t totals = 0;     ///< sums over runs of keys (forward/lane_totals.hpp)
  std::size_t floats = 0;
};

[[gnu::always_inline]] inline EightBitScratch eight_bit_scratch(std::int64_t head_dim_qk,
                                                                std::int64_t head_dim_v, int block_q,
                                                                bool on_unit) {
  EightBitScratch s;
  const auto take = [&s](std::int64_t count) {
    const std::size_t at = s.floats;
    s.floats += static_cast<std::size_t>((count + 15) / 16 * 16);
    return at;
  };
  const std::int64_t in_bytes = key_bytes(head_dim_qk, on_unit);
  s.q = take(on_unit ? block_q * in_bytes / 4 : block_q * head_dim_qk);
  s.out = take(block_q * head_dim_v);
  s.held = take(on_unit ? 0 : block_q * head_dim_v);
  s.scores = take(quant_block * 64);
  s.k = take(quant_block * (head_dim_qk > head_dim_v ? head_dim_qk : head_dim_v));
  s.v = take(quant_block * (on_unit && head_dim_qk > head_dim_v ? head_dim_qk : head_dim_v));
  s.quantized = take(quant_block * in_bytes / 4);
  s.channels = take(2 * head_dim_v);
  s.rows = take(8 * static_cast<std::int64_t>(block_q));
  const std::size_t totals = totals_bytes(block_q, static_cast<int>(head_dim_v));
  s.totals = take(static_cast<std::int64_t>(totals / sizeof(float)));
  return s;
}

/// The attention kernel for one instruction set.
struct EightBitKernel {
  void (*run)(const EightBitTile& tile) = nullptr;
  /// Put a block's `count` rows of K or V into tiles of a matrix unit. `scratch`: quant_block * columns
  /// bytes. Null without a unit.
  void (*arrange_keys)(const std::uint8_t* rows, int count, int channels, std::uint8_t* to) = nullptr;
  void (*arrange_values)(const std::uint8_t* rows, int count, int columns, std::byte* scratch,
                         std::uint8_t* to) = nullptr;
};

}  // namespace tandem::cpu
