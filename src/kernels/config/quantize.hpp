// What specialises the quantiser's kernels, and what they are launched with. Plain aggregates, as in
// config/types.hpp; where codes and scales go is quantized_layout.hpp's to say.
#pragma once

#include "kernels/config/types.hpp"
#include "problem/quantized_layout.hpp"

namespace tandem {

struct QuantizeConfig {
  Element element = Element::bf16;
  int head_dim_qk = 128;  ///< the true ones: how a row is rotated depends on them
  int head_dim_v = 128;
  Codes qk = Codes::e4m3;
  Codes pv = Codes::e4m3;
  ScaleGroup qk_scales = ScaleGroup::block;  ///< of k: any but channel; else block or row
  ScaleGroup v_scales = ScaleGroup::block;
  bool rotate_qk = true;
  bool rotate_v = false;
  bool smooth_k = true;
  bool rotary = false;       ///< a rotary embedding first (of k, `varlen` false)
  bool interleaved = false;  ///< its pairs are neighbours
  bool varlen = false;       ///< lengths differ by sequence
  /// Rows allow 16-byte loads and rows of codes 8-byte stores, and there are whole ones.
  bool vectors = true;

  constexpr bool operator==(const QuantizeConfig&) const = default;
  /// Resident blocks of threads: what 16, 32 or 64 values a thread leave room for.
  [[nodiscard]] constexpr int blocks_per_sm() const {
    const int dim = head_dim_qk > head_dim_v ? head_dim_qk : head_dim_v;
    return dim <= 64 ? 3 : dim <= 128 ? 2 : 1;
  }
};

/// `config` with only what the kernel of K's mean depends on: one serves many recipes.
constexpr QuantizeConfig mean_config(const QuantizeConfig& config) {
  return {.element = config.element,
          .head_dim_qk = config.head_dim_qk,
          .rotary = config.rotary,
          .interleaved = config.interleaved,
          .varlen = config.varlen,
          .vectors = config.vectors};
}

/// Groups of scales whose largest magnitude takes a launch of its own to find.
constexpr bool exceeds_block(ScaleGroup group) {
  return group == ScaleGroup::tensor || group == ScaleGroup::head;
}

/// One unit is quant_block rows of a head: four threads a row.
constexpr int quantize_threads = 4 * quant_block;

/// Channels of a row as four threads divide them: vectors of 8, thread t has vectors t, t + 4, ...
constexpr int quantize_channels(int head_dim) {
  return (head_dim + 31) / 32 * 32;
}

/// Dynamic shared memory: twice the warps' maxima, the tile of V's codes.
constexpr int arrange_shared_bytes(const QuantizeConfig& c) {
  const int tables = 2 * 2 * 4 * (quantize_threads / 32);
  return tables + (c.pv == Codes::input ? 0 : quant_block * quantize_channels(c.head_dim_v));
}
/// The rows of a job.
constexpr int quantize_rows_bytes(const QuantizeConfig& c) {
  const int dim = c.head_dim_qk > c.head_dim_v ? c.head_dim_qk : c.head_dim_v;
  return 2 * quant_block * quantize_channels(dim);
}
/// K's means that a job needs: of as many heads as have a slot of 16 rows.
constexpr int quantize_mean_bytes(const QuantizeConfig& c) {
  const int dim = c.head_dim_qk > c.head_dim_v ? c.head_dim_qk : c.head_dim_v;
  return 4 * quantize_channels(dim) * (c.varlen ? quant_block / 16 : 1);
}
constexpr int quantize_jobs = 4;  ///< places of quantizer::Job (three are in use)
constexpr int quantize_job_bytes = 128;
/// The quantiser's: rows and means of a job and of the next one besides.
constexpr int quantize_shared_bytes(const QuantizeConfig& c) {
  return arrange_shared_bytes(c) + 2 * quantize_rows_bytes(c) + quantize_jobs * quantize_job_bytes +
         2 * quantize_mean_bytes(c);
}

/// The kernel of K's means: 16 vectors of 8 channels a thread at most, and a pair of channels.
constexpr int mean_threads(const QuantizeConfig& c) {
  return c.head_dim_qk <= 128 ? 128 : 256;
}
constexpr int mean_shared_bytes(const QuantizeConfig& c) {
  return 2 * quant_block * quantize_channels(c.head_dim_qk);
}

/// A tensor that is quantised, and its codes and scales. Code strides in bytes; for V, `row` is the stride
/// from channel to channel.
struct QuantizedTensor {
  const void* source;
  Strides stride;
  unsigned char* codes;
  Strides code_stride;
  float* scales;
  ScaleStrides scale_stride;
  int code_columns;  ///< that are written in each row of codes; those behind the head dimension with 0
  bool padded_rows;  ///< scales by row are written up to the end of a sequence's last block, with 0
  bool marks_rows;   ///< s8, scales by block: rows that are no numbers are marked, or make the scale NaN
};

/// The largest magnitude of a group that is larger than a block, found by a launch of its own.
struct GroupLargest {
  unsigned int bits;  ///< of the f32; 0 before the launches
  unsigned int bad;   ///< 1 if a value is not finite
};

/// Tables of a rotary embedding, by row and pair of channels.
struct RotaryTables {
  const float* cos;
  const float* sin;
  long long cos_stride;  ///< from row to row
  long long sin_stride;
  int dim;  ///< channels that take part: a multiple of 16
};

struct QuantizeParams {
  QuantizedTensor q, k, v;
  RotaryTables rotary;
  float* shift;  ///< null if no mean is removed
  ScaleStrides shift_stride;
  float* mean;  ///< [batch][kv head][quantize_channels(head_dim_qk)]
  ScaleStrides mean_stride;
  float* sums;            ///< K's channel sums, [batch][kv head][blocks][quantize_channels(head_dim_qk)]
  int mean_all_keys;      ///< sequences of more keys have their mean of a sample
  unsigned int* arrived;  ///< by (batch, kv head): blocks whose sums are there; 0 before the launch
  GroupLargest* largest;  ///< of k, by (batch, kv head) or one; read where k's scales are of such groups
  LengthArray cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  int batch;
  int heads_q;
  int heads_kv;
  int group;  ///< query heads of a kv head
  int rows_q;
  int rows_k;
  int blocks_q;  ///< of 128 rows in rows_q (equal lengths)
  int blocks_k;
  int axis_blocks_k;  ///< quantized_blocks of k
  int together_q;     ///< heads of a unit: more than one where sequences are short
  int together_k;
  int units_q;  ///< blocks of the axis times heads, `together` of them as one; 0: the tensor is left out
  int units_k;
  int units_v;
  float scale;  ///< of the softmax
  bool packed_q;
  bool packed_k;
};

/// The scales of a tensor of codes that the caller brings; null data is 1 everywhere. Groups are blocks of
/// quant_block rows or rows of the tensor, and have stride 0 where they are larger.
struct BroughtScales {
  const float* data;
  ScaleStrides stride;  ///< batch: of sequences
  int heads;            ///< of the tensor that share one
  bool by_row;
};

/// What arrange_codes is launched with: in `quantize` the sources are codes, and there is no mean.
struct ArrangeParams {
  QuantizeParams quantize;
  BroughtScales q_scale, k_scale, v_scale;
};

}  // namespace tandem
