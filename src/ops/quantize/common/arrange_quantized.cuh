// Copies caller-supplied 8-bit Q, K and V with their scales into the layout that the 8-bit attention kernel
// reads (quantized_layout.hpp): contiguous rows, V with keys contiguous, one scale for each block or row.
// Bound by memory: each value is read and written once.
//
// Work items, threads and the transposition of V are those of the quantiser. Scales are written without their
// signs: the values take them.
#pragma once

#include "ops/quantize/common/quantize.cuh"

namespace tandem {

namespace quantizer {

/// The caller's scale of row `row` of the item, which is in use.
TANDEM_DEVICE float caller_scale(const CallerScales& s, const WorkItem& item, int row) {
  if (s.data == nullptr) return 1.0F;
  const i64 group = s.by_row ? item.begin + static_cast<i64>(item.first + row) : item.block;
  return ptx::load_global(s.data + item.batch * s.stride.batch + item.head / s.heads * s.stride.head +
                          group * s.stride.group);
}

/// Returns the scale of the row. One of the threads that share it stores its magnitude.
template <ScaleGroup group>
TANDEM_DEVICE float copy_scale(const QuantizedTensor& x, const CallerScales& s, const WorkItem& item, int row,
                               int thread) {
  constexpr bool by_row = group == ScaleGroup::row;
  const float scale = item.first + row < item.used ? caller_scale(s, item, row) : 0.0F;
  if (by_row ? thread % row_threads == 0 : thread == 0) {
    const i64 at = by_row ? static_cast<i64>(item.block) * quant_block + row : item.block;
    ptx::store_global(x.scales + offset_of(x.scale_stride, item, at), ptx::max_magnitude(0.0F, scale));
  }
  return scale;
}

/// Four values negated. -128, whose negative s8 does not have, becomes 127.
template <OperandType type>
TANDEM_DEVICE u32 negate(u32 word) {
  if constexpr (type == OperandType::e4m3) return word ^ 0x80808080U;
  u32 result = 0;
#pragma unroll
  for (int i = 0; i < 32; i += 8) {
    const u32 code = word >> i & 0xFFU;
    result |= (code == 0x80U ? 0x7FU : (0U - code) & 0xFFU) << i;
  }
  return result;
}

/// Eight values of a row from `col` on. Those past its end, and those of rows that are not in use, are 0.
template <OperandType type, bool vectors>
TANDEM_DEVICE Quantized8 load_quantized(const u8* row, int col, int head_dim, bool used, bool negative) {
  u32 words[2] = {0, 0};
  if constexpr (vectors) {
    if (used && col < head_dim) {
      const u64 both = ptx::load_global(reinterpret_cast<const u64*>(row + col));
      words[0] = static_cast<u32>(both);
      words[1] = static_cast<u32>(both >> 32);
    }
  } else if (used) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (col + i < head_dim)
        words[i / 4] |= static_cast<u32>(ptx::load_global(row + col + i)) << (8 * (i % 4));
    }
  }
  if (negative) return {negate<type>(words[0]), negate<type>(words[1])};
  return {words[0], words[1]};
}

/// A negative softmax scale negates Q's values: the attention kernel takes only positive scales.
template <QuantizeConfig C, Which which>
TANDEM_DEVICE void arrange_rows(const ArrangeParams& p, int number) {
  const QuantizedTensor& x = which == Which::q ? p.quantize.q : p.quantize.k;
  WorkItem item;
  if (!locate<C>(which == Which::q ? query_side(p.quantize) : key_side(p.quantize), number, item)) return;
  const int thread = static_cast<int>(ptx::thread_index());
  const int t = thread % row_threads;
  const int row = thread / row_threads;
  const float scale =
      copy_scale<C.qk_scales>(x, which == Which::q ? p.q_scale : p.k_scale, item, row, thread);
  if (item.first + row >= item.used) return;
  const bool negative = (scale < 0.0F) != (which == Which::q && p.quantize.scale < 0.0F);
  const i64 at = item.begin + static_cast<i64>(item.first + row);
  const u8* const from = static_cast<const u8*>(x.source) + offset_of(x.stride, item, at);
  u8* const to = x.quantized + offset_of(x.quantized_stride, item, at);
#pragma unroll
  for (int j = 0; j < Row<C.head_dim_qk>::vectors; ++j) {
    const int col = Row<C.head_dim_qk>::channel(j, t);
    store_quantized<C.vectors>(x, to, col,
                               load_quantized<C.qk, C.vectors>(from, col, C.head_dim_qk, true, negative));
  }
}

template <QuantizeConfig C>
TANDEM_DEVICE void arrange_values(const ArrangeParams& p, int number) {
  const QuantizedTensor& x = p.quantize.v;
  WorkItem item;
  if (!locate<C>(key_side(p.quantize), number, item)) return;
  const int thread = static_cast<int>(ptx::thread_index());
  const int t = thread % row_threads;
  const int key = key_of_thread<row_threads>(thread);
  const float scale = copy_scale<C.v_scales>(x, p.v_scale, item, key, thread);
  const i64 at = item.begin + static_cast<i64>(item.first + key);
  const u8* const from = static_cast<const u8*>(x.source) + offset_of(x.stride, item, at);
  const Tables table = tables<C>();
#pragma unroll
  for (int j = 0; j < Row<C.head_dim_v>::vectors; ++j) {
    put_quantized_v<C, row_threads>(
        table, thread, j,
        load_quantized<C.pv, C.vectors>(from, Row<C.head_dim_v>::channel(j, t), C.head_dim_v,
                                        item.first + key < item.used, scale < 0.0F));
  }
  ptx::sync_block();
  u8* const quantized =
      x.quantized + offset_of(x.quantized_stride, item, 0) + static_cast<i64>(item.block) * quant_block;
  store_transposed<C.head_dim_v, row_threads, zero_points<C>>(quantized, x.quantized_stride.row, table,
                                                              thread);
}

}  // namespace quantizer

/// Work items of K, then of V and of Q.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads) arrange_quantized(const __grid_constant__ ArrangeParams p) {
  ptx::launch_next_grid();
  int item = static_cast<int>(ptx::block_index());
  if (item < p.quantize.items_k) {
    quantizer::arrange_rows<C, quantizer::Which::k>(p, item);
  } else if (item -= p.quantize.items_k; item < p.quantize.items_v) {
    quantizer::arrange_values<C>(p, item);
  } else {
    quantizer::arrange_rows<C, quantizer::Which::q>(p, item - p.quantize.items_v);
  }
}

}  // namespace tandem
