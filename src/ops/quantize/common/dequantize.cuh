// Dequantises caller-supplied 8-bit K and V, as a cache has them, for the 16-bit attention kernel: each value
// times its scale in f32, rounded to 16 bits. Bound by memory: a byte is read and two are written for every
// element.
//
// Work items, threads and the caller's scales are those of arrange_quantized.
#pragma once

#include "ops/quantize/common/arrange_quantized.cuh"
#include "tile/widen.cuh"

namespace tandem {

namespace quantizer {

/// Eight 8-bit values as f32.
template <OperandType type>
TANDEM_DEVICE void widen(float (&x)[8], const Quantized8& from) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    tile::widen_two<type>(x[i], x[i + 1], i < 4 ? from.low : from.high, i % 4);
  }
}

/// An item of K or V. Rows that are not in use are left as they are.
template <QuantizeConfig C, OperandType type, int head_dim>
TANDEM_DEVICE void dequantize_rows(const QuantizeParams& p, const QuantizedTensor& x,
                                   const CallerScales& scales, int number) {
  WorkItem item;
  if (!locate<C>(key_side(p), number, item)) return;
  const int thread = static_cast<int>(ptx::thread_index());
  const int t = thread % row_threads;
  const int row = thread / row_threads;
  if (item.first + row >= item.used) return;
  const i64 at = item.begin + static_cast<i64>(item.first + row);
  const u8* const from = static_cast<const u8*>(x.source) + offset_of(x.stride, item, at);
  u16* const to = reinterpret_cast<u16*>(x.quantized) + offset_of(x.quantized_stride, item, at);
  Quantized8 raw[Row<head_dim>::vectors];
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    raw[j] = load_quantized<type, C.vectors>(from, Row<head_dim>::channel(j, t), head_dim, true, false);
  }
  const float scale = caller_scale(scales, item, row);
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    const int col = Row<head_dim>::channel(j, t);
    if (col >= head_dim) continue;
    float values[8];
    widen<type>(values, raw[j]);
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = ptx::multiply(values[2 * i], scale);
      const float high = ptx::multiply(values[2 * i + 1], scale);
      words[i] = C.element == Element::bf16 ? ptx::pack_bf16(low, high) : ptx::pack_f16(low, high);
    }
    ptx::store_global(reinterpret_cast<ptx::Vec4*>(to + col),
                      ptx::Vec4{words[0], words[1], words[2], words[3]});
  }
}

}  // namespace quantizer

/// Work items of K, then of V.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads) dequantize(const __grid_constant__ ArrangeParams p) {
  const QuantizeParams& items = p.quantize;
  const int item = static_cast<int>(ptx::block_index());
  if (item < items.items_k) {
    quantizer::dequantize_rows<C, C.qk, C.head_dim_qk>(items, items.k, p.k_scale, item);
  } else {
    quantizer::dequantize_rows<C, C.pv, C.head_dim_v>(items, items.v, p.v_scale, item - items.items_k);
  }
}

}  // namespace tandem
