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
  float* maxima;     ///< largest values, 16 for each: of the warps
  ptx::Vec4* signs;  ///< the rotation's: [vector][thread of a row], as PackedRow has words
  float* mean;       ///< K's of a head, with those signs
  char* rest;
};
template <QuantizeConfig C>
TANDEM_DEVICE Shared shared_memory() {
  char* const base = ptx::dynamic_shared();
  char* const signs = base + gradient_maxima_bytes;
  return {reinterpret_cast<float*>(base), reinterpret_cast<ptx::Vec4*>(signs),
          reinterpret_cast<float*>(signs + gradient_signs_bytes), base + gradient_rows_bytes(C)};
}

/// The order of 16 rows in an operand that is transposed: which of them stands at a position. A thread has
/// four scores of a key as an operand of dV and dK packs them, and stmatrix stores keys r and r + 8 of a
/// query side by side.
enum class RowOrder : int { rows, queries, keys };
template <RowOrder order>
TANDEM_DEVICE int row_of_thread(int thread) {
  const int position = static_cast<int>(static_cast<u32>(thread) / row_threads);
  if constexpr (order == RowOrder::queries) return position / 16 * 16 + v_key_of(position % 16);
  if constexpr (order == RowOrder::keys) return position / 16 * 16 + position % 16 / 2 + position % 2 * 8;
  return position;
}

/// Elements of a thread's part of a row, two a word: word w of vector j has channels (4 j + t) * 8 + 2 w,
/// + 1.
template <int head_dim>
struct PackedRow {
  static_assert(head_dim == 64 || head_dim == 128, "signs are of up to four vectors a thread");
  u32 words[Row<head_dim>::vectors][4];

  TANDEM_DEVICE void set(int j, const ptx::Vec4& v) {
    words[j][0] = v.x;
    words[j][1] = v.y;
    words[j][2] = v.z;
    words[j][3] = v.w;
  }
};

/// The thread's part of a row, 0 unless `used`.
template <QuantizeConfig C, int head_dim>
TANDEM_DEVICE PackedRow<head_dim> load_row(const u16* row, int t, bool used) {
  PackedRow<head_dim> packed;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    ptx::Vec4 v{0, 0, 0, 0};
    if (!C.vectors) {
      v = quantizer::load_elements(row, (4 * j + t) * 8, head_dim, used);
    } else if (used) {
      v = ptx::load_global(reinterpret_cast<const ptx::Vec4*>(row + 8 * t) + 4 * j);
    }
    packed.set(j, v);
  }
  return packed;
}
TANDEM_DEVICE const u16* row_at(const void* data, const Strides& s, const WorkItem& item, i64 row) {
  return static_cast<const u16*>(data) + quantizer::offset_of(s, item, row);
}

/// The rotation's signs of 128 channels, a bit each.
struct SignBits {
  u32 words[4];

  constexpr SignBits() : words{} {
    for (int c = 0; c < 128; ++c) {
      if (rotation_sign(c) < 0.0F) words[c / 32] |= 1U << c % 32;
    }
  }
};
/// The sign of channel c as a float has it.
TANDEM_DEVICE u32 sign_of(u32 c) {
  constexpr SignBits bits;
  const u32 low = (c & 32) != 0 ? bits.words[1] : bits.words[0];
  const u32 high = (c & 32) != 0 ? bits.words[3] : bits.words[2];
  return ((c & 64) != 0 ? high : low) >> c % 32 << 31;
}
/// Puts the signs into shared memory, and store_mean K's mean of a head, if one is removed. Threads of the
/// CTA call, and a barrier has to follow.
TANDEM_DEVICE void store_signs(const Shared& shared) {
  const u32 i = ptx::thread_index();
  if (i >= gradient_signs_bytes / 4) return;
  const u32 c = i / 16 * 32 + i / 4 % row_threads * 8 + i % 4 * 2;
  ptx::store_shared(reinterpret_cast<u32*>(shared.signs) + i, sign_of(c + 1) | sign_of(c) >> 16);
}
template <QuantizeConfig C>
TANDEM_DEVICE void store_mean(const EightBitBackwardParams& p, const Shared& shared, int batch, int head_kv) {
  const QuantizeParams& q = p.quantize;
  const u32 c = ptx::thread_index();
  if (!C.smooth_k || c >= C.head_dim_qk) return;
  const float mean =
      ptx::load_global(q.mean + batch * q.mean_stride.batch + head_kv * q.mean_stride.head + c);
  ptx::store_shared(shared.mean + c, ptx::float_of(ptx::bits_of(mean) ^ sign_of(c)));
}
/// On packed pairs signs cost half as many instructions as on f32.
template <int head_dim>
TANDEM_DEVICE void apply_signs(PackedRow<head_dim>& row, const Shared& shared, int t) {
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    const ptx::Vec4 signs = ptx::load_shared(shared.signs + row_threads * j + t);
    row.words[j][0] ^= signs.x;
    row.words[j][1] ^= signs.y;
    row.words[j][2] ^= signs.z;
    row.words[j][3] ^= signs.w;
  }
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

/// What a row's roundings depend on beside its values.
struct QueryTerms {
  float lse;  ///< a NaN if the largest logit is one
  float
      exponent;  ///< that of r, the row's largest P over a power of two near its root; -inf: it sees nothing

  /// r; 0 where the row sees nothing.
  [[nodiscard]] TANDEM_DEVICE float root() const { return ptx::exp2(exponent); }
  [[nodiscard]] TANDEM_DEVICE bool sees() const { return exponent != -ptx::infinity(); }
  [[nodiscard]] TANDEM_DEVICE bool number() const { return lse == lse; }
  /// r; 0 also where the row is no number.
  [[nodiscard]] TANDEM_DEVICE float factor() const { return number() ? root() : 0.0F; }
};
TANDEM_DEVICE QueryTerms query_terms(const EightBitBackwardParams& p, const WorkItem& item, i64 row,
                                     bool used) {
  QueryTerms terms{0.0F, -ptx::infinity()};
  if (!used) return terms;
  const float lse = ptx::load_global(p.lse + quantizer::offset_of(p.lse_stride, item, row));
  const float most = ptx::load_global(p.max_logits + quantizer::offset_of(p.max_logits_stride, item, row));
  if (most == -ptx::infinity()) return terms;
  const float x = most - lse;
  if (x != x) return {ptx::quiet_nan(), 0.0F};
  const float bounded = ptx::fmax(-44.0F, -ptx::fmax(-44.0F, -x));
  const float power = ptx::round(ptx::multiply(bounded, 0.5F * tile::log2_e));
  return {lse, ptx::fma(bounded, tile::log2_e, -power)};
}
/// The magnitude of the gradient of a row's LSE, as far as it counts.
TANDEM_DEVICE float dlse_of(const EightBitBackwardParams& p, const WorkItem& item, i64 row,
                            const QueryTerms& terms) {
  if (p.dlse == nullptr || !terms.sees()) return 0.0F;
  const float dlse = ptx::load_global(p.dlse + quantizer::offset_of(p.dlse_stride, item, row));
  return dlse - dlse == 0.0F ? ptx::abs(dlse) : 0.0F;
}
/// Where an item of queries begins in the workspace: the number of its first query block, and how many of
/// its one or two there are.
template <QuantizeConfig C>
struct QueryBlocks {
  static constexpr EightBitBackwardConfig config{.tiling = {.block_m = gradient_queries(C.head_dim_qk)}};
  static constexpr int rows = config.tiling.block_m;
  static constexpr int most = quant_block / rows;
  static_assert(most == 1 || most == 2);

  int first;  ///< on the axis of a head
  i64 number;
  int count;

  TANDEM_DEVICE QueryBlocks(const EightBitBackwardParams& p, const WorkItem& item)
      : first(first_query_block<config>(p, item.batch, item.begin) + item.first / rows),
        number(workspace_block(p, item.head, first)),
        count(most == 2 && item.used - item.first > rows ? 2 : 1) {}
};

/// The largest of the CTA's rows, for several numbers at once, none of them negative or a NaN. Each call
/// has `maxima` of its own.
template <int count>
TANDEM_DEVICE void find_largest(float (&x)[count], float* maxima) {
  constexpr int warps = quantize_threads / warp_size;
  const int thread = static_cast<int>(ptx::thread_index());
  const int lane = thread % warp_size;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const float largest = quantizer::largest_of_warp(x[i]);
    if (lane == 0) ptx::store_shared(maxima + i * warps + thread / warp_size, largest);
  }
  ptx::sync_block();
#pragma unroll
  for (int i = 0; i < count; ++i)
    x[i] = quantizer::largest_of_warp(ptx::load_shared(maxima + i * warps + lane % warps));
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
  const bool bad = (of_warp >> (lane / row_threads * row_threads) & 0xFU) != 0;
  if (bad) largest = 0.0F;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) row.x[j][i] = bad ? 0.0F : row.x[j][i];
  }
  ptx::sync_warp();  // without which the compiler makes 32 selections of each row, whether one is bad or not
  return bad;
}

TANDEM_DEVICE quantizer::Scale block_scale(float largest) {
  return quantizer::scale_for<OperandType::s8>({largest, false});
}

/// Where a thread's part of a row in s8 goes.
TANDEM_DEVICE u64* quantized_at(const QuantizedTensor& x, const WorkItem& item, i64 row, int t) {
  return reinterpret_cast<u64*>(x.quantized + quantizer::offset_of(x.quantized_stride, item, row)) + t;
}
TANDEM_DEVICE u64 as_one(const quantizer::Quantized8& eight) {
  return static_cast<u64>(eight.high) << 32 | eight.low;
}

/// Rows in e4m3 on their way to being columns: word w of the row at a position (of a CTA's 128) is w of
/// its words combined (exclusive or) with this. Threads that store rows, two words each, and threads that
/// load words of 8 rows each then use all banks (of rows of 64, half of them).
template <int head_dim>
TANDEM_DEVICE u32 swizzle_of(u32 position) {
  return (position / 8 * 2 ^ position % 4 * 8) % (head_dim / 4);
}

/// A thread's part of a row in s8.
template <int head_dim>
struct QuantizedRow {
  quantizer::Quantized8 vectors[Row<head_dim>::vectors];
};
/// Stores the thread's part of a row over the scale of its block in s8, if the row is `used`, and puts it,
/// times `factor`, into the tile: vector by vector, which takes the fewest registers.
template <int head_dim>
TANDEM_DEVICE QuantizedRow<head_dim> store_row(u64* to, bool used, u32* tile, const Row<head_dim>& values,
                                               float inverse, float factor) {
  QuantizedRow<head_dim> rounded;
  const u32 thread = ptx::thread_index_anew();  // so that addresses are not kept from one row to the next
  const u32 position = thread / row_threads;
  const u32 t = thread % row_threads;
  u32* const row = tile + position * (head_dim / 4);
#pragma unroll
  for (u32 j = 0; j < Row<head_dim>::vectors; ++j) {
    rounded.vectors[j] = quantizer::encode<OperandType::s8>(values.x[j], inverse, false);
    if (used) ptx::store_global(to + 4 * j, as_one(rounded.vectors[j]));
    ptx::store_shared(reinterpret_cast<u64*>(row + ((8 * j + 2 * t) ^ swizzle_of<head_dim>(position))),
                      as_one(quantizer::encode<OperandType::e4m3>(values.x[j], factor, false)));
  }
  return rounded;
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
  constexpr u32 eights = quant_block / 8;
  static_assert(quantize_threads / eights >= head_dim / 4);
  const u32 first = ptx::thread_index() % eights * 8;
  const u32 word = ptx::thread_index() / eights;
  if (static_cast<int>(first) >= rows || word >= head_dim / 4) return;
  const u32* const from = tile + first * (head_dim / 4);
  u32 words[2][4];
#pragma unroll
  for (u32 i = 0; i < 8; ++i)
    words[i / 4][i % 4] = ptx::load_shared(
        from + i * (head_dim / 4) + (word ^ swizzle_of<head_dim>(first) ^ swizzle_of<head_dim>(i % 4)));
  transpose_bytes(words[0]);
  transpose_bytes(words[1]);
  u8* to = x.data + at + 4 * word * x.row + first;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ptx::store_global(reinterpret_cast<u64*>(to), as_one({words[0][i], words[1][i]}));
    to += x.row;
  }
}

}  // namespace tandem::gradients
