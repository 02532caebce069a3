// Rows of queries, keys and values as the kernels before the 8-bit backward kernel have them: 128 rows of a
// head a CTA, four threads a row, as the quantiser's. Also the factors that rows and heads are rounded by.
#pragma once

#include "ops/eight_bit_backward/config.hpp"
#include "ops/quantize/common/quantize_rotation.cuh"
#include "tile/backward_tiles.cuh"
#include "tile/gradient_units.cuh"
#include "tile/softmax.cuh"

namespace tandem::gradients {

using quantizer::Row;
using quantizer::row_threads;
using quantizer::WorkItem;

/// A CTA's shared memory: gradient_rows_bytes, and behind it what a kernel has for itself.
struct Shared {
  u32* maxima;  ///< bits of largest values, 16 for each: of the warps
  float* mean;  ///< K's of a head, with the signs of the rotation
  char* rest;
};
template <QuantizeConfig C>
TANDEM_DEVICE Shared shared_memory() {
  char* const base = ptx::dynamic_shared();
  return {reinterpret_cast<u32*>(base), reinterpret_cast<float*>(base + gradient_maxima_bytes),
          base + gradient_rows_bytes(C)};
}

/// The order of 16 rows in an operand that is transposed: which of them stands at a position. A thread has
/// four scores of a key as an operand of dV and dK packs them, and stmatrix stores keys r and r + 8 of a
/// query side by side.
enum class RowOrder : int { rows, queries, keys };
template <RowOrder order>
TANDEM_DEVICE int row_of_thread(int thread) {
  const int position = thread / row_threads;
  if constexpr (order == RowOrder::queries) return position / 16 * 16 + v_key_of(position % 16);
  if constexpr (order == RowOrder::keys) return position / 16 * 16 + position % 16 / 2 + position % 2 * 8;
  return position;
}

/// Elements of a thread's part of a row, two a word: word w of vector j has channels (4 j + t) * 8 + 2 w, + 1.
template <int head_dim>
struct PackedRow {
  static_assert(head_dim == 128, "signs and rotated_dot are of four vectors a thread");
  u32 words[Row<head_dim>::vectors][4];
};

/// The thread's part of a row, 0 unless `used`.
template <QuantizeConfig C, int head_dim>
TANDEM_DEVICE PackedRow<head_dim> load_row(const u16* row, int t, bool used) {
  PackedRow<head_dim> packed;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    const int col = (4 * j + t) * 8;
    ptx::Vec4 v{0, 0, 0, 0};
    if (!C.vectors) {
      v = quantizer::load_elements(row, col, head_dim, used);
    } else if (used) {
      v = ptx::load_global(reinterpret_cast<const ptx::Vec4*>(row + col));
    }
    packed.words[j][0] = v.x;
    packed.words[j][1] = v.y;
    packed.words[j][2] = v.z;
    packed.words[j][3] = v.w;
  }
  return packed;
}
TANDEM_DEVICE const u16* row_at(const void* data, const Strides& s, const WorkItem& item, i64 row) {
  return static_cast<const u16*>(data) + quantizer::offset_of(s, item, row);
}

/// Which of a thread's channels the rotation negates: of word k of its PackedRow bit 15 - k is for the first
/// channel, and bit 31 - k for the second.
struct PairSigns {
  u32 of_thread[row_threads];

  constexpr PairSigns() : of_thread{} {
    for (int c = 0; c < 128; ++c) {
      const int word = c / 32 * 4 + c % 8 / 2;
      if (rotation_sign(c) < 0.0F) of_thread[c / 8 % row_threads] |= 1U << (15 + c % 2 * 16 - word);
    }
  }
};
TANDEM_DEVICE u32 pair_signs(int t) {
  constexpr PairSigns signs;
  const u32 low = (t & 1) != 0 ? signs.of_thread[1] : signs.of_thread[0];
  const u32 high = (t & 1) != 0 ? signs.of_thread[3] : signs.of_thread[2];
  return (t & 2) != 0 ? high : low;
}
/// On packed pairs signs cost half as many instructions as on f32.
template <int head_dim>
TANDEM_DEVICE void apply_signs(PackedRow<head_dim>& row, u32 signs) {
#pragma unroll
  for (int k = 0; k < 16; ++k) row.words[k / 4][k % 4] ^= signs << k & 0x80008000U;
}

template <QuantizeConfig C, int head_dim>
TANDEM_DEVICE Row<head_dim> unpacked(const PackedRow<head_dim>& packed) {
  Row<head_dim> row;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      row.x[j][i] = ptx::unpack<C.element>(static_cast<u16>(packed.words[j][i / 2] >> (16 * (i % 2))));
  }
  return row;
}

/// Puts K's mean of a head, with the signs of the rotation, into shared memory. Threads of the CTA call, and
/// a barrier has to follow.
template <QuantizeConfig C>
TANDEM_DEVICE void store_mean(const EightBitBackwardParams& p, const Shared& shared, int batch, int head_kv) {
  const QuantizeParams& q = p.quantize;
  const int c = static_cast<int>(ptx::thread_index());
  if (!C.smooth_k || c >= C.head_dim_qk) return;
  const float mean =
      ptx::load_global(q.mean + batch * q.mean_stride.batch + head_kv * q.mean_stride.head + c);
  const int word = c / 32 * 4 + c % 8 / 2;
  const u32 sign = pair_signs(c / 8 % row_threads) << (c % 2 == 0 ? 16 + word : word) & 0x80000000U;
  ptx::store_shared(shared.mean + c, ptx::float_of(ptx::bits_of(mean) ^ sign));
}

/// What a row's roundings depend on beside its values.
struct QueryTerms {
  float lse;
  float exponent;  ///< that of r, the row's largest P over a power of two near its root
  float root;      ///< r; 0 where the row sees nothing
  bool number;     ///< neither the LSE nor the largest logit is a NaN
};
TANDEM_DEVICE QueryTerms query_terms(const EightBitBackwardParams& p, const WorkItem& item, i64 row,
                                     bool used) {
  QueryTerms terms{0.0F, 0.0F, 0.0F, true};
  if (!used) return terms;
  terms.lse = ptx::load_global(p.lse + quantizer::offset_of(p.lse_stride, item, row));
  const float most = ptx::load_global(p.max_logits + quantizer::offset_of(p.max_logits_stride, item, row));
  if (most == -ptx::infinity()) return terms;
  const float x = most - terms.lse;
  terms.number = x == x;
  if (terms.number) {
    const float bounded = ptx::fmax(-44.0F, -ptx::fmax(-44.0F, -x));
    const float power = ptx::round(ptx::multiply(bounded, 0.5F * tile::log2_e));
    terms.exponent = ptx::fma(bounded, tile::log2_e, -power);
  }
  terms.root = ptx::exp2(terms.exponent);
  return terms;
}
/// The magnitude of the gradient of a row's LSE, as far as it counts.
TANDEM_DEVICE float dlse_of(const EightBitBackwardParams& p, const WorkItem& item, i64 row,
                            const QueryTerms& terms) {
  if (p.dlse == nullptr || terms.root == 0.0F) return 0.0F;
  const float dlse = ptx::load_global(p.dlse + quantizer::offset_of(p.dlse_stride, item, row));
  return dlse - dlse == 0.0F ? ptx::abs(dlse) : 0.0F;
}
/// Where an item of queries begins in the workspace: the number of its first block of 64, and how many of
/// its two blocks there are.
struct QueryBlocks {
  int first;  ///< on the axis of a head
  i64 number;
  int count;
};
TANDEM_DEVICE QueryBlocks query_blocks(const EightBitBackwardParams& p, const WorkItem& item) {
  constexpr EightBitBackwardConfig config;
  constexpr int rows = config.tiling.block_m;
  static_assert(quant_block == 2 * rows);
  const int first = first_query_block<config>(p, item.batch, item.begin) + item.first / rows;
  return {first, workspace_block(p, item.head, first), item.used - item.first > rows ? 2 : 1};
}

/// The largest of the CTA's rows, for several numbers at once, none of them negative or a NaN. Each call
/// has `maxima` of its own.
template <int count>
TANDEM_DEVICE void find_largest(float (&x)[count], u32* maxima) {
  constexpr int warps = quantize_threads / warp_size;
  const int thread = static_cast<int>(ptx::thread_index());
  const int lane = thread % warp_size;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const u32 largest = ptx::reduce_max(ptx::bits_of(x[i]));  // such floats are ordered as their bits
    if (lane == 0) ptx::store_shared(maxima + i * warps + thread / warp_size, largest);
  }
  ptx::sync_block();
#pragma unroll
  for (int i = 0; i < count; ++i)
    x[i] = ptx::float_of(ptx::reduce_max(ptx::load_shared(maxima + i * warps + lane % warps)));
}

/// Whether the row is no number; it is 0 then. `largest` is the largest magnitude of the thread's part.
template <int head_dim>
TANDEM_DEVICE bool clear_if_bad(Row<head_dim>& row, float& largest) {
  largest = 0.0F;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = ptx::max_magnitude(largest, row.x[j][i]);
  }
  const u32 of_warp = ptx::ballot(!(largest <= quantizer::largest_float));
  if (of_warp == 0) return false;
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
  if ((of_warp >> (lane / row_threads * row_threads) & 0xFU) == 0) return false;
  largest = 0.0F;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) row.x[j][i] = 0.0F;
  }
  return true;
}

TANDEM_DEVICE quantizer::Scale block_scale(float largest) {
  return quantizer::scale_for<OperandType::s8>({largest, false});
}

/// A thread's part of a row in s8.
template <int head_dim>
struct QuantizedRow {
  quantizer::Quantized8 vectors[Row<head_dim>::vectors];
};
template <int head_dim>
TANDEM_DEVICE QuantizedRow<head_dim> quantized(const Row<head_dim>& values, float inverse) {
  QuantizedRow<head_dim> row;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j)
    row.vectors[j] = quantizer::encode<OperandType::s8>(values.x[j], inverse, false);
  return row;
}
template <int head_dim>
TANDEM_DEVICE void store_row(const QuantizedTensor& x, const WorkItem& item, i64 row, int t,
                             const QuantizedRow<head_dim>& values) {
  u8* const to = x.quantized + quantizer::offset_of(x.quantized_stride, item, row) + 8 * t;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    const quantizer::Quantized8& eight = values.vectors[j];
    ptx::store_global(reinterpret_cast<u64*>(to + 32 * j), static_cast<u64>(eight.high) << 32 | eight.low);
  }
}

/// Rows in e4m3 on their way to being columns: a row's 32 words, those of a thread side by side, stand in an
/// order in which threads that store rows, and threads that load words of 8 rows each, use all banks.
TANDEM_DEVICE int swizzle_of(int position) {
  return position / 8 % 16 * 2 ^ position % 4 * 8;
}

/// Puts the thread's part of a row, times `factor`, into the tile.
template <int head_dim>
TANDEM_DEVICE void put_row(u32* tile, const Row<head_dim>& values, float factor) {
  const int thread = static_cast<int>(ptx::thread_index());
  const int position = thread / row_threads;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    const quantizer::Quantized8 eight = quantizer::encode<OperandType::e4m3>(values.x[j], factor, false);
    const int word = (8 * j + 2 * (thread % row_threads)) ^ swizzle_of(position);
    ptx::store_shared(reinterpret_cast<u64*>(tile + position * (head_dim / 4) + word),
                      static_cast<u64>(eight.high) << 32 | eight.low);
  }
}

/// 4 x 4 bytes: byte n of word i becomes byte i of word n.
TANDEM_DEVICE void transpose_bytes(u32 (&words)[4]) {
  const u32 even[2] = {ptx::permute_bytes(words[0], words[1], 0x5140),
                       ptx::permute_bytes(words[2], words[3], 0x5140)};
  const u32 odd[2] = {ptx::permute_bytes(words[0], words[1], 0x7362),
                      ptx::permute_bytes(words[2], words[3], 0x7362)};
  words[0] = ptx::permute_bytes(even[0], even[1], 0x5410);
  words[1] = ptx::permute_bytes(even[0], even[1], 0x7632);
  words[2] = ptx::permute_bytes(odd[0], odd[1], 0x5410);
  words[3] = ptx::permute_bytes(odd[0], odd[1], 0x7632);
}

/// Writes the first `rows` rows of the tile, a multiple of 8, as columns: each thread four channels of 8.
template <int head_dim>
TANDEM_DEVICE void store_tile(const u32* tile, const TransposedOperand& x, i64 at, int rows) {
  static_assert(quantize_threads / (quant_block / 8) == head_dim / 4);
  const int thread = static_cast<int>(ptx::thread_index());
  const int eight = thread % (quant_block / 8);
  const int word = thread / (quant_block / 8);
  if (8 * eight >= rows) return;
  u32 words[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int position = 8 * eight + i;
    words[i / 4][i % 4] =
        ptx::load_shared(tile + position * (head_dim / 4) + (word ^ swizzle_of(position)));
  }
  transpose_bytes(words[0]);
  transpose_bytes(words[1]);
  u8* const to = x.data + at + 4 * word * x.row + 8 * eight;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    ptx::store_global(reinterpret_cast<u64*>(to + i * x.row),
                      static_cast<u64>(words[1][i]) << 32 | words[0][i]);
}

}  // namespace tandem::gradients
