// Rows of queries, keys and values as the kernels before the 8-bit backward kernel have them: 128 rows of a
// head a CTA, four threads a row, as the quantiser's. Also the factors that rows and heads are rounded by.
#pragma once

#include "ops/eight_bit_backward/config.hpp"
#include "ops/quantize/common/quantize.cuh"
#include "tile/backward_tiles.cuh"
#include "tile/gradient_units.cuh"
#include "tile/softmax.cuh"

namespace tandem::gradients {

using quantizer::Row;
using quantizer::WorkItem;

/// The order of 16 rows in an operand that is transposed: which of them stands at a position. A thread has
/// four scores of a key as an operand of dV and dK packs them, and stmatrix stores keys r and r + 8 of a
/// query side by side.
enum class RowOrder : int { rows, queries, keys };
template <RowOrder order>
TANDEM_DEVICE int row_of_thread(int thread) {
  const int position = thread / quantizer::row_threads;
  if constexpr (order == RowOrder::queries) return position / 16 * 16 + v_key_of(position % 16);
  if constexpr (order == RowOrder::keys) return position / 16 * 16 + position % 16 / 2 + position % 2 * 8;
  return position;
}

/// The thread's part of a row, 0 unless `used`.
template <QuantizeConfig C, int head_dim>
TANDEM_DEVICE void load_row(Row<head_dim>& values, const u16* row, int t, bool used) {
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    const int col = (4 * j + t) * 8;
    ptx::Vec4 v{0, 0, 0, 0};
    if (!C.vectors) {
      v = quantizer::load_elements(row, col, head_dim, used);
    } else if (used && col < head_dim) {
      v = ptx::load_global(reinterpret_cast<const ptx::Vec4*>(row + col));
    }
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      values.x[j][i] = ptx::unpack<C.element>(static_cast<u16>(words[i / 2] >> (16 * (i % 2))));
  }
}
TANDEM_DEVICE const u16* row_at(const void* data, const Strides& s, const WorkItem& item, i64 row) {
  return static_cast<const u16*>(data) + quantizer::offset_of(s, item, row);
}

template <int head_dim>
TANDEM_DEVICE void clear(Row<head_dim>& values) {
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values.x[j][i] = 0.0F;
  }
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

/// The largest of the CTA's rows; `buffer` alternates from call to call.
TANDEM_DEVICE float largest_of_rows(const quantizer::Tables& table, float x, int buffer) {
  const int thread = static_cast<int>(ptx::thread_index());
  return quantizer::of_block<OperandType::e4m3>({x, false}, table, thread / warp_size, thread % warp_size,
                                                quantize_threads / warp_size, buffer * quantize_pass_bytes)
      .largest;
}

/// Whether the row is no number; it is 0 then.
template <int head_dim>
TANDEM_DEVICE bool clear_if_bad(Row<head_dim>& row, float& largest) {
  const quantizer::Magnitude m = quantizer::magnitude_of(row);
  const bool bad = quantizer::row_is_bad(m.bad, static_cast<int>(ptx::thread_index()) % warp_size);
  largest = bad ? 0.0F : m.largest;
  if (bad) clear(row);
  return bad;
}

/// The scale of the CTA's block, from the largest magnitudes of its threads.
TANDEM_DEVICE quantizer::Scale block_scale(const quantizer::Tables& table, float largest, int buffer) {
  return quantizer::scale_for<OperandType::s8>({largest_of_rows(table, largest, buffer), false});
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
  u8* const to = x.quantized + quantizer::offset_of(x.quantized_stride, item, row);
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j)
    quantizer::store_quantized<true>(x, to, (4 * j + t) * 8, values.vectors[j]);
}

/// Puts the thread's part of a row, times `factor`, into the tile that is written transposed.
template <int head_dim>
TANDEM_DEVICE void put_row(const quantizer::Tables& table, const Row<head_dim>& values, float factor) {
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j)
    quantizer::put_transposed(table, static_cast<int>(ptx::thread_index()), j,
                              quantizer::encode<OperandType::e4m3>(values.x[j], factor, false));
}

/// K's mean of a head, in shared memory; null where none is removed. Threads of the CTA call.
template <QuantizeConfig C>
TANDEM_DEVICE float* load_mean(const EightBitBackwardParams& p, int batch, int head_kv) {
  if constexpr (!C.smooth_k) return nullptr;
  auto* const mean = reinterpret_cast<float*>(ptx::dynamic_shared() + arrange_shared_bytes(C));
  const QuantizeParams& q = p.quantize;
  const int thread = static_cast<int>(ptx::thread_index());
  if (thread < C.head_dim_qk) {
    ptx::store_shared(mean + thread, ptx::load_global(q.mean + batch * q.mean_stride.batch +
                                                      head_kv * q.mean_stride.head + thread));
  }
  ptx::sync_block();
  return mean;
}

/// Writes the tile to where the main kernel reads it, from the item's first column on.
template <int head_dim>
TANDEM_DEVICE void store_tile(const quantizer::Tables& table, const TransposedOperand& x, i64 at, int rows) {
  const int chunks = rows / 16;
  quantizer::store_transposed<head_dim, 0>(x.data + at, x.row, table, static_cast<int>(ptx::thread_index()),
                                           0, chunks, chunks);
}

}  // namespace tandem::gradients
