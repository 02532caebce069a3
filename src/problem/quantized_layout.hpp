// Where the quantiser puts quantized values and scales, and where the 8-bit attention kernel finds them.
// Plain aggregates, no includes but these: the same file serves the host compiler and NVRTC.
//
// Blocks are 128 rows (quant_block) counted from a sequence's first row in use. Each sequence has an axis of
// whole blocks to itself: without packing the batch index tells sequences apart; packed ones lie on one axis,
// sequence b from block number begin / 128 + b on (`first_block`), which needs no sum over the sequences
// before it and never overlaps. "Padded row" r of a sequence is 128 * first_block + r on that axis.
//
//   q, k     [batch][head][row][pitch]; packed: [1][head][rows of all sequences][pitch], rows as the
//            user's. pitch = quantized_pitch(head_dim); of a row only the first head_dim values are read.
//   v        [batch][kv head][quantized_pitch(head_dim_v)][padded keys]; packed: [1][kv head]... Keys are
//            contiguous and stand, within each 16, in the order of v_key_of. Up to the end of a sequence's
//            last block all keys past its rows in use are 0. Rows from head_dim_v on are not read.
//            Where takes_zero_point says so they are stored as u8 with zero point 128.
//   scales   f32 factors of the values. By block: [batch][head][blocks]; by row: [batch][head][padded rows];
//            packed: [1][head]... A group that is larger than a block has stride 0 along it. Scales by row of
//            V are 0 for keys past a sequence's rows in use, up to the end of its last block. A negative
//            scale by block stands for its magnitude, and says that a row of the block has a nan_marker.
//            The attention kernel is given the magnitude of the softmax's scale: where the user's is
//            negative, q's quantized values have the other sign.
//   shift    f32 [batch][query head][padded rows]: what the removal of K's mean took off a row's logits,
//            scale * q_i . mean (natural logarithm; before a softcap). Null where no mean was removed.
#pragma once

#include "problem/recipe.hpp"

namespace tandem {

/// Elements from row to row of a matrix of quantized values: TMA wants multiples of 16 bytes.
constexpr long long quantized_pitch(long long head_dim) {
  return (head_dim + 15) / 16 * 16;
}

/// Blocks on the axis of one batch entry, or of all sequences if they are packed.
constexpr long long quantized_blocks(long long rows, long long batch, bool packed) {
  return packed ? rows / quant_block + batch : (rows + quant_block - 1) / quant_block;
}

/// The block that a sequence's first row falls into: 0 if not packed; `begin` is its entry of cu_seqlens
/// (clamped to the tensor's rows), `b` its number.
constexpr int first_block(int begin, int b, bool packed) {
  return packed ? begin / quant_block + b : 0;
}

/// V's order of keys: the stored position `at` of 16 holds the key with this number of 16. The four keys that
/// a thread's 8-bit A operand takes are then the four scores that it has (ptx/wgmma.cuh).
constexpr int v_key_of(int at) {
  return 2 * (at / 4) + at % 2 + 8 * (at / 2 % 2);
}
/// The position of key `key` of 16: v_key_of's inverse.
constexpr int v_position_of(int key) {
  return 4 * (key % 8 / 2) + key % 2 + 2 * (key / 8);
}
static_assert(v_key_of(4) == 2 && v_key_of(6) == 10 && v_position_of(10) == 6 && v_position_of(9) == 3);

/// Whether V's s8 values, with scales by block, are stored as u8 with zero point 128. Their products with P,
/// which is u8 too, are then not negative, and the sums need no conversion to f32 (tile/tile_softmax.cuh). Up
/// to 128 columns that costs more than it saves.
constexpr bool takes_zero_point(OperandType pv, bool row_scales, long long head_dim_v) {
  return pv == OperandType::s8 && !row_scales && head_dim_v > 128;
}
/// Four s8 values combined with this (exclusive or) are the u8 values with zero point 128. It applies to
/// values that stand for no key too.
constexpr unsigned four_zero_points = 0x80808080U;

/// Elements from one batch entry, head, and group (block or row) to the next.
struct ScaleStrides {
  long long batch;
  long long head;
  long long group;
};

/// Scales of one tensor, or any other f32 array by (batch, head, group).
struct ScaleArray {
  const float* data;
  ScaleStrides stride;
};

}  // namespace tandem
