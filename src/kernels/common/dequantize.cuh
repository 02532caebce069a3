// 8-bit K and V with scales, as a caller's cache has them, to 16 bits, for the 16-bit attention kernel: code
// * scale in f32, rounded once more. Bound by memory: a byte read and two written for every element.
//
// Units, threads and the caller's scales are those of arrange_codes.
#pragma once

#include "kernels/common/arrange_codes.cuh"

namespace tandem {

namespace quantizer {

/// Eight codes as f32.
template <Codes codes>
TANDEM_DEVICE void widen_codes(float (&x)[8], const Codes8& from) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const u32 two = (i < 4 ? from.low : from.high) >> (8 * (i % 4)) & 0xFFFFU;
    if constexpr (codes == Codes::e4m3) {
      ptx::unpack_e4m3(x[i], x[i + 1], two);
    } else {
      // The byte less its sign's weight joins 2^23, whose last bit is 1.
      constexpr u32 bias = 0x4B000000U;
      x[i] = ptx::float_of(bias | ((two & 0xFFU) ^ 0x80U)) - (0x1p23F + 128.0F);
      x[i + 1] = ptx::float_of(bias | (two >> 8 ^ 0x80U)) - (0x1p23F + 128.0F);
    }
  }
}

/// A unit of K or V. Rows that are not in use are left as they are.
template <QuantizeConfig C, Codes codes, int head_dim>
TANDEM_DEVICE void dequantize_rows(const QuantizeParams& p, const QuantizedTensor& x,
                                   const BroughtScales& scales, int number) {
  Unit u;
  if (!locate<C>(key_side(p), number, u)) return;
  const int thread = static_cast<int>(ptx::thread_index());
  const int t = thread % row_threads;
  const int row = thread / row_threads;
  if (u.first + row >= u.used) return;
  const i64 at = u.begin + static_cast<i64>(u.first + row);
  const u8* const from = static_cast<const u8*>(x.source) + offset_of(x.stride, u, at);
  u16* const to = reinterpret_cast<u16*>(x.codes) + offset_of(x.code_stride, u, at);
  Codes8 raw[Row<head_dim>::vectors];
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    raw[j] = load_codes<codes, C.vectors>(from, (4 * j + t) * 8, head_dim, true, false);
  }
  const float scale = brought_scale(scales, u, row);
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    const int col = (4 * j + t) * 8;
    if (col >= head_dim) continue;
    float values[8];
    widen_codes<codes>(values, raw[j]);
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

/// Units of K, then of V.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads) dequantize(const __grid_constant__ ArrangeParams p) {
  const QuantizeParams& units = p.quantize;
  const int unit = static_cast<int>(ptx::block_index());
  if (unit < units.units_k) {
    quantizer::dequantize_rows<C, C.qk, C.head_dim_qk>(units, units.k, p.k_scale, unit);
  } else {
    quantizer::dequantize_rows<C, C.pv, C.head_dim_v>(units, units.v, p.v_scale, unit - units.units_k);
  }
}

}  // namespace tandem
