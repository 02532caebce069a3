// Reads quantized Q, K and V into scratch memory as f32.
#pragma once

#include "cpu/eight_bit/work.hpp"
#include "cpu/simd/stage.hpp"
#include "cpu/simd/transpose.hpp"

namespace tandem::cpu::TANDEM_TARGET {
extern const QuantizeKernel quantize_kernel;
}

namespace tandem::cpu::TANDEM_TARGET::eight_bit {

/// Converts quantized values to the integers or e4m3 numbers that they stand for.
TANDEM_INLINE void decode(OperandType type, const std::uint8_t* in, std::int64_t count, float* out) {
  if (type == OperandType::s8) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(static_cast<std::int8_t>(in[i]));
  } else {
    widen_rows(reinterpret_cast<const e4m3*>(in), count, 1, static_cast<int>(count), out, count);
  }
}

/// Finds the scale of V by channel for this block, and the factor for sums that are held in the scale of the
/// block before.
inline void scale_channels(const Work& w, const KeyBlock& b) {
  const Recipe& r = w.tile.recipe;
  const int dim = w.t.head_dim_v;
  for (int c = 0; c < dim; ++c) {
    float unit = 1.0F;
    if (r.v_scales == ScaleGroup::channel) {
      unit = w.tile.v_scales[b.begin / quant_block * dim + c];
    } else if (r.v_scales != ScaleGroup::row) {
      unit = w.tile.v_scales[b.begin];
    }
    const float before = b.opens ? 0.0F : w.s.v_reference[c];
    if (unit == 0.0F) unit = before;  // a block of zeros takes the scale that there is
    w.s.v_ratio[c] = before > 0.0F ? before / unit : 1.0F;
    w.s.v_reference[c] = unit;
  }
}

inline void stage(const Work& w, const KeyBlock& b) {
  const ForwardTile& t = w.t;
  const EightBitTile& tile = w.tile;
  decode(tile.recipe.qk, tile.k_quantized + b.begin * t.head_dim_qk,
         static_cast<std::int64_t>(b.count) * t.head_dim_qk, w.s.k);
  decode(tile.recipe.pv, tile.v_quantized + b.begin * t.head_dim_v,
         static_cast<std::int64_t>(b.count) * t.head_dim_v, w.s.v);
  scale_channels(w, b);
}

/// Finds scale * q . mean of each row: what the removal of K's mean subtracts from its logits.
inline void find_shifts(const Work& w) {
  const int dim = w.t.head_dim_qk;
  for (int i = 0; i < w.t.block_q; ++i) w.s.shift[i] = 0.0F;
  if (w.tile.mean == nullptr) return;
  float* const row = w.s.k;
  for (int i = 0; i < w.t.count; ++i) {
    const std::int64_t at = (w.t.first + i) * w.t.q.row_stride;
    if (w.t.dtype == DType::f16) {
      widen_rows(static_cast<const f16*>(w.t.q.data) + at, 0, 1, dim, row, 0);
    } else {
      widen_rows(static_cast<const bf16*>(w.t.q.data) + at, 0, 1, dim, row, 0);
    }
    double sums[vec_lanes] = {};
    int c = 0;
    for (; c + vec_lanes <= dim; c += vec_lanes) {
      for (int n = 0; n < vec_lanes; ++n)
        sums[n] += static_cast<double>(row[c + n]) * static_cast<double>(w.tile.mean[c + n]);
    }
    double sum = 0.0;
    for (; c < dim; ++c) sum += static_cast<double>(row[c]) * static_cast<double>(w.tile.mean[c]);
    for (const double of_lane : sums) sum += of_lane;
    w.s.shift[i] = static_cast<float>(sum * static_cast<double>(w.t.scale));
  }
}

/// Takes caller-supplied values and scales of `count` rows of Q, a block of the tile that begins with its row
/// `first`.
inline void copy_queries(const Work& w, int first, int count) {
  const ForwardTile& t = w.t;
  const float* const scales = w.tile.q_scales + first / quant_block * w.tile.q_scale_stride_blocks;
  const std::int64_t stride = key_bytes(t.head_dim_qk, w.tile.on_unit);
  for (int i = 0; i < count; ++i) {
    copy_quantized(static_cast<const std::uint8_t*>(t.q.data) + (t.first + first + i) * t.q.row_stride,
                   w.tile.recipe.qk, t.head_dim_qk, scales[i * w.tile.q_scale_stride],
                   w.s.quantized + i * stride, w.s.q_scale[first + i]);
  }
}

/// Quantises `count` rows of Q, from the tile's row `first` on.
inline void quantize_queries(const Work& w, int first, int count) {
  const ForwardTile& t = w.t;
  const Recipe& r = w.tile.recipe;
  const auto item = static_cast<std::int64_t>(2);
  const QuantizeRows rows{
      .data = static_cast<const std::byte*>(t.q.data) + (t.first + first) * t.q.row_stride * item,
      .dtype = t.dtype,
      .stride = t.q.row_stride,
      .rows = count,
      .dim = t.head_dim_qk,
      .mean = nullptr,
      .rotate = r.rotate_qk,
      .scratch = w.s.k};
  quantize_kernel.quantize(rows, {.type = r.qk,
                                  .group = r.qk_scales,
                                  .largest = w.tile.q_largest,
                                  .out = w.s.quantized,
                                  .out_stride = key_bytes(t.head_dim_qk, w.tile.on_unit),
                                  .scales = w.s.q_scale + first,
                                  .nan_markers = true});
}

/// Puts the quantized values of rows [first, first + count) into lanes.
inline void pack_queries(const Work& w, int first, int count) {
  const int dim = w.t.head_dim_qk;
  decode(w.tile.recipe.qk, w.s.quantized, static_cast<std::int64_t>(count) * dim, w.s.k);
  for (int i = count; i < quant_block; ++i)
    __builtin_memset(w.s.k + static_cast<std::int64_t>(i) * dim, 0,
                     sizeof(float) * static_cast<std::size_t>(dim));
  for (int i = 0; i < quant_block; i += stripe_lanes) {
    transpose(w.s.k + static_cast<std::int64_t>(i) * dim, dim, stripe_lanes, dim,
              w.s.q + static_cast<std::int64_t>(first + i) * dim, stripe_lanes);
  }
}

#if defined(TANDEM_MATRIX_UNIT)
/// pack_queries for the matrix unit: four channels a word, up to whole tiles.
inline void pack_query_words(const Work& w, int first, int count) {
  const std::int64_t bytes = key_bytes(w.t.head_dim_qk, true);
  const int words = static_cast<int>(bytes / 4);
  __builtin_memset(w.s.quantized + count * bytes, 0, static_cast<std::size_t>((quant_block - count) * bytes));
  for (int i = 0; i < count && bytes > w.t.head_dim_qk; ++i) {
    __builtin_memset(w.s.quantized + i * bytes + w.t.head_dim_qk, 0,
                     static_cast<std::size_t>(bytes - w.t.head_dim_qk));
  }
  for (int i = 0; i < quant_block; i += stripe_lanes) {
    transpose(reinterpret_cast<const float*>(w.s.quantized + i * bytes), words, stripe_lanes, words,
              w.s.q + static_cast<std::int64_t>(first + i) * words, stripe_lanes);
  }
}
#endif

/// Q's values, in lanes, and its scales times the softmax's.
inline void stage_queries(const Work& w) {
  const ForwardTile& t = w.t;
  for (int first = 0; first < t.count; first += quant_block) {
    const int count = t.count - first < quant_block ? t.count - first : quant_block;
    if (w.tile.q_scales != nullptr) {
      copy_queries(w, first, count);
    } else {
      quantize_queries(w, first, count);
    }
#if defined(TANDEM_MATRIX_UNIT)
    if (w.tile.on_unit) {
      pack_query_words(w, first, count);
      continue;
    }
#endif
    pack_queries(w, first, count);
  }
  const float factor = t.softcap != 0.0F ? t.scale : t.scale * log2_e;
  for (int i = 0; i < t.block_q; ++i)
    w.s.q_scale[i] = i < t.count ? scale_of_row(w.s.q_scale[i]) * factor : 0.0F;
}

}  // namespace tandem::cpu::TANDEM_TARGET::eight_bit
