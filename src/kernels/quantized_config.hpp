// What host and device share of the 8-bit forward kernel: its Config and Params. Plain aggregates: the same
// file is compiled by the host compiler and by NVRTC.
#pragma once

#include "kernels/config.hpp"
#include "kernels/quantized_layout.hpp"

namespace tandem {

/// Everything that specialises the 8-bit forward kernel. A tile is block_m queries by 128 keys (quant_block),
/// so that K and V have one scale a tile where their scales are by block.
struct QuantizedConfig {
  Element element = Element::bf16;  ///< of out; where pv is `input`, of P and V too
  Codes qk = Codes::e4m3;
  Codes pv = Codes::e4m3;
  int head_dim_qk = 128;      ///< padded to a multiple of 32
  int head_dim_v = 128;       ///< padded to a multiple of 32
  int block_m = 128;          ///< 64 x consumer warpgroups
  int stages = 2;             ///< K tiles, and V tiles, in flight
  int q_stages = 1;           ///< 2: the next tile's Q comes in while this tile's is still read
  bool causal = false;        ///< window_right is bounded: right edge needs a mask
  bool local = false;         ///< window_left is bounded: left edge needs a mask
  bool ragged = false;        ///< lengths differ by sequence (cu_seqlens or seqused)
  bool row_scales = false;    ///< of Q and K: one a row; else one a block (or a larger group)
  bool v_row_scales = false;  ///< of V: one a row, which joins P
  bool rotated_v = false;     ///< V's rotation is undone on the rows of O
  bool dynamic = false;       ///< blocks draw tiles from a counter instead of being dealt them
  bool overlap = true;        ///< softmax of one block runs under the products of the next, in one warpgroup
  bool pingpong = true;       ///< warpgroups take turns: one's softmax under the other's products
  int parts = 2;        ///< P V is computed and promoted by so many column ranges of V, one after the other
  int polynomials = 0;  ///< of 8 exponentials, those that the FMA pipe computes

  constexpr bool operator==(const QuantizedConfig&) const = default;
  [[nodiscard]] constexpr int consumers() const { return block_m / 64; }
  [[nodiscard]] constexpr int threads() const { return 128 * (consumers() + 1); }
  [[nodiscard]] constexpr RegisterSplit registers() const { return split_registers(consumers(), 1); }
};

/// What the 8-bit forward kernel is launched with. In `forward`, q, k and v are maps of codes: q and k with
/// dimensions (head_dim, rows, heads, batch), v with (padded keys, head_dim_v, heads, batch), or as for 16
/// bits where pv is `input`; scale is not negative.
struct QuantizedParams {
  ForwardParams forward;
  ScaleArray q_scales;
  ScaleArray k_scales;
  ScaleArray v_scales;  ///< null data where pv is `input`
  ScaleArray shift;     ///< null data: none
};

}  // namespace tandem
