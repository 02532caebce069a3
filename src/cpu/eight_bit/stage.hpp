// Reads quantized Q, K and V into scratch memory as f32.
#pragma once

#include "cpu/eight_bit/work.hpp"
#include "cpu/simd/stage.hpp"

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
  for (int i = 0; i < quant_block; ++i) w.s.shift[i] = 0.0F;
  if (w.tile.mean == nullptr) return;
  for (int i = 0; i < w.t.count; ++i) {
    const std::int64_t at = (w.t.first + i) * w.t.q.row_stride;
    double sum = 0.0;
    for (int c = 0; c < dim; ++c) {
      const float q = w.t.dtype == DType::f16 ? to_f32(static_cast<const f16*>(w.t.q.data)[at + c])
                                              : to_f32(static_cast<const bf16*>(w.t.q.data)[at + c]);
      sum += static_cast<double>(q) * static_cast<double>(w.tile.mean[c]);
    }
    w.s.shift[i] = static_cast<float>(sum * static_cast<double>(w.t.scale));
  }
}

/// Takes Q's caller-supplied values and scales.
inline void copy_queries(const Work& w) {
  const ForwardTile& t = w.t;
  for (int i = 0; i < t.count; ++i) {
    copy_quantized(static_cast<const std::uint8_t*>(t.q.data) + (t.first + i) * t.q.row_stride,
                   w.tile.recipe.qk, t.head_dim_qk, w.tile.q_scales[i * w.tile.q_scale_stride],
                   w.s.quantized + static_cast<std::int64_t>(i) * t.head_dim_qk, w.s.q_scale[i]);
  }
}

/// Quantises Q.
inline void quantize_queries(const Work& w) {
  const ForwardTile& t = w.t;
  const Recipe& r = w.tile.recipe;
  const int dim = t.head_dim_qk;
  const auto item = static_cast<std::int64_t>(2);
  const QuantizeRows rows{.data = static_cast<const std::byte*>(t.q.data) + t.first * t.q.row_stride * item,
                          .dtype = t.dtype,
                          .stride = t.q.row_stride,
                          .rows = t.count,
                          .dim = dim,
                          .mean = nullptr,
                          .rotate = r.rotate_qk,
                          .scratch = w.s.k};
  quantize_kernel.quantize(rows, {.type = r.qk,
                                  .group = r.qk_scales,
                                  .largest = w.tile.q_largest,
                                  .out = w.s.quantized,
                                  .out_stride = dim,
                                  .scales = w.s.q_scale,
                                  .nan_markers = true});
}

/// Puts Q's values into lanes, and multiplies its scales by the softmax's.
inline void stage_queries(const Work& w) {
  const ForwardTile& t = w.t;
  const Recipe& r = w.tile.recipe;
  const int dim = t.head_dim_qk;
  if (w.tile.q_scales != nullptr) {
    copy_queries(w);
  } else {
    quantize_queries(w);
  }
  const float factor = t.softcap != 0.0F ? t.scale : t.scale * log2_e;
  for (int i = 0; i < quant_block; ++i)
    w.s.q_scale[i] = i < t.count ? scale_of_row(w.s.q_scale[i]) * factor : 0.0F;
  decode(r.qk, w.s.quantized, static_cast<std::int64_t>(t.count) * dim, w.s.k);
  __builtin_memset(w.s.q, 0,
                   sizeof(float) * static_cast<std::size_t>(quant_block) * static_cast<std::size_t>(dim));
  for (int i = 0; i < t.count; ++i) {
    float* const lane =
        w.s.q + static_cast<std::int64_t>(i / stripe_lanes) * dim * stripe_lanes + i % stripe_lanes;
    for (int c = 0; c < dim; ++c)
      lane[static_cast<std::int64_t>(c) * stripe_lanes] = w.s.k[static_cast<std::int64_t>(i) * dim + c];
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET::eight_bit
