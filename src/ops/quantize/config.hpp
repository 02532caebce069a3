// What specialises the quantiser's kernels, and what they are launched with. Plain aggregates, as in
// config/types.hpp. quantized_layout.hpp defines the layout of quantized values and scales.
#pragma once

#include "config/types.hpp"
#include "problem/quantized_layout.hpp"

namespace tandem {

struct QuantizeConfig {
  Element element = Element::bf16;
  int head_dim_qk = 128;  ///< the true ones, not padded: the rotation of a row depends on them
  int head_dim_v = 128;
  OperandType qk = OperandType::e4m3;
  OperandType pv = OperandType::e4m3;
  ScaleGroup qk_scales = ScaleGroup::block;  ///< for k any but channel; for q and v block or row
  ScaleGroup v_scales = ScaleGroup::block;
  bool rotate_qk = true;
  bool rotate_v = false;
  bool smooth_k = true;
  bool varlen = false;  ///< lengths differ by sequence
  /// Rows allow 16-byte loads, and rows of quantized values stores of 8 bytes, or 16 (stores_sixteen).
  bool vectors = true;

  constexpr bool operator==(const QuantizeConfig&) const = default;
  [[nodiscard]] constexpr int largest_head_dim() const {
    return head_dim_qk > head_dim_v ? head_dim_qk : head_dim_v;
  }
  /// Threads that share a row: as few as 64 values a thread allow, since what else a thread does is then done
  /// for more values.
  [[nodiscard]] constexpr int row_threads() const { return largest_head_dim() <= 128 ? 2 : 4; }
  /// Whether rows of quantized q and k are written in vectors of 16.
  [[nodiscard]] constexpr bool stores_sixteen() const {
    return vectors && row_threads() == 2 && head_dim_qk % 32 == 0;
  }
  [[nodiscard]] constexpr int threads() const { return row_threads() * quant_block; }
  /// Resident CTAs of an SM: what the values leave room for.
  [[nodiscard]] constexpr int blocks_per_sm() const {
    return largest_head_dim() <= 64 ? 4 : largest_head_dim() <= 128 ? 2 : 1;
  }
};

/// `config` reduced to what the kernel of K's mean depends on: one kernel serves many recipes.
constexpr QuantizeConfig mean_config(const QuantizeConfig& config) {
  return {.element = config.element,
          .head_dim_qk = config.head_dim_qk,
          .varlen = config.varlen,
          .vectors = config.vectors};
}

/// Whether the largest magnitude of a scale's group takes a launch of its own to find.
constexpr bool exceeds_block(ScaleGroup group) {
  return group == ScaleGroup::tensor || group == ScaleGroup::head;
}

/// A work item is quant_block rows. Four threads share a row where no values are kept in registers.
constexpr int quantize_threads = 4 * quant_block;

/// Channels of a row padded so that its threads divide them.
constexpr int quantize_channels(int head_dim) {
  return (head_dim + 31) / 32 * 32;
}

/// Dynamic shared memory of arrange_quantized: the warps' maxima twice, and the tile of V.
constexpr int arrange_shared_bytes(const QuantizeConfig& c) {
  const int tables = 2 * 2 * 4 * (quantize_threads / 32);
  return tables + (c.pv == OperandType::input ? 0 : quant_block * quantize_channels(c.head_dim_v));
}
/// The rows of a pass.
constexpr int quantize_rows_bytes(const QuantizeConfig& c) {
  return 2 * quant_block * quantize_channels(c.largest_head_dim());
}
/// K's means that a pass needs: those of as many heads as there are segments of 16 rows.
constexpr int quantize_mean_bytes(const QuantizeConfig& c) {
  return 4 * quantize_channels(c.largest_head_dim()) * (c.varlen ? quant_block / 16 : 1);
}
constexpr int quantize_passes = 8;  ///< buffers of quantizer::Pass
constexpr int passes_at_once = 4;   ///< that are found together, while the four before them are in use
constexpr int quantize_pass_bytes = 128;
/// Dynamic shared memory of the quantiser: in addition, rows and means of two passes.
constexpr int quantize_shared_bytes(const QuantizeConfig& c) {
  return arrange_shared_bytes(c) + 2 * quantize_rows_bytes(c) + quantize_passes * quantize_pass_bytes +
         2 * quantize_mean_bytes(c);
}

/// Threads of the kernel of K's mean: each copies at most 16 vectors of 8 channels and sums a pair of
/// channels.
constexpr int mean_threads(const QuantizeConfig& c) {
  return c.head_dim_qk <= 128 ? 128 : 256;
}
constexpr int mean_shared_bytes(const QuantizeConfig& c) {
  return 2 * quant_block * quantize_channels(c.head_dim_qk);
}

/// A tensor, its quantized values and scales. Strides of quantized values are in bytes;
/// for V, `row` is the stride from channel to channel.
struct QuantizedTensor {
  const void* source;
  Strides stride;
  unsigned char* quantized;
  Strides quantized_stride;
  float* scales;
  ScaleStrides scale_stride;
  int quantized_columns;  ///< columns that are written in each row: 0 past the head dimension
  bool padded_rows;  ///< scales by row are written up to the end of a sequence's last block: 0 past its rows
  bool nan_markers;  ///< s8, scales by block: rows with a NaN get a marker; else it makes the scale NaN
};

/// The largest magnitude of a group that is larger than a block, found by a launch of its own.
struct GroupLargest {
  unsigned int bits;  ///< bits of the f32; 0 before the launches
  unsigned int bad;   ///< 1 if a value is not finite
};

struct QuantizeParams {
  QuantizedTensor q, k, v;
  float* shift;  ///< null if no mean is removed
  ScaleStrides shift_stride;
  float* mean;  ///< [batch][kv head][quantize_channels(head_dim_qk)]
  ScaleStrides mean_stride;
  float* sums;            ///< K's channel sums, [batch][kv head][blocks][quantize_channels(head_dim_qk)]
  int mean_all_keys;      ///< sequences with more keys take the mean of a sample
  unsigned int* arrived;  ///< by (batch, kv head): blocks whose sums are written; 0 before the launch
  GroupLargest* largest;  ///< k's by (batch, kv head) or one; read where k's scales are of such groups
  LengthArray cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  int batch;
  int heads_q;
  int heads_kv;
  int group;  ///< query heads of a kv head
  int rows_q;
  int rows_k;
  int blocks_q;  ///< blocks of 128 rows in rows_q (equal lengths)
  int blocks_k;
  int axis_blocks_k;     ///< quantized_blocks of k
  int heads_per_item_q;  ///< heads of an item: more than one where sequences are short
  int heads_per_item_k;
  int items_q;  ///< work items: blocks of the axis, times heads / heads_per_item; 0: no such tensor
  int items_k;
  int items_v;
  float scale;  ///< the softmax's
  bool packed_q;
  bool packed_k;
};

/// Caller-supplied scales of a quantized tensor; null data stands for 1. Groups are blocks of quant_block
/// rows, or rows; larger groups have stride 0.
struct CallerScales {
  const float* data;
  ScaleStrides stride;  ///< `batch` is from sequence to sequence
  int heads;            ///< heads of the tensor that share a scale
  bool by_row;
};

/// What arrange_quantized and dequantize are launched with. In `quantize` the sources are quantized values,
/// and there is no mean.
struct ArrangeParams {
  QuantizeParams quantize;
  CallerScales q_scale, k_scale, v_scale;
};

}  // namespace tandem
