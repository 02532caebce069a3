// What the 8-bit backward kernel multiplies of queries: Q and dO as rows of s8 values, for S and dP, and
// transposed in e4m3, for dK and dV; with them the rows' terms. quantize_keys.cuh comes before. Bound by
// memory: Q, O and dO are read once. docs/numerics.md has the recipe.
//
// s8 has no NaN. A row of Q or dO with a NaN or an infinity is 0 in every operand, and its LSE becomes a NaN,
// which reaches what it sees.
#pragma once

#include "ops/eight_bit_backward/common/gradient_rows.cuh"
#include "ptx/mma.cuh"

namespace tandem {

namespace gradients {

/// One of eight s8 values. Its byte, raised by 128, is the last of a float whose unit is 1.
TANDEM_DEVICE float value_of(const quantizer::Quantized8& eight, int i) {
  const u32 raised = (i < 4 ? eight.low : eight.high) ^ 0x80808080U;
  const u32 bits = ptx::permute_bytes(raised, 0x4B000000U, 0x7440U | static_cast<u32>(i % 4));
  return ptx::float_of(bits) - (0x1p23F + 128.0F);
}

/// Where a thread keeps its parts of rows while others are rounded, for itself alone.
template <QuantizeConfig C>
TANDEM_DEVICE ptx::Vec4* slots(const Shared& shared, int tensor) {
  return reinterpret_cast<ptx::Vec4*>(shared.rest) + tensor * (Row<C.head_dim_v>::vectors * quantize_threads);
}
/// Starts copying the thread's part of a row there, as a group of copies; 0 unless `used`.
template <QuantizeConfig C, int head_dim>
TANDEM_DEVICE void fetch_row(ptx::Vec4* to, const u16* row, bool used) {
  const int thread = static_cast<int>(ptx::thread_index());
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    quantizer::fetch_vector<C.vectors, head_dim>(to + j * quantize_threads + thread, row,
                                                 (4 * j + thread % row_threads) * 8, used);
  }
  ptx::commit_copies();
}
/// The thread's part, with the signs of the rotation, when all groups but the last `pending` are there.
template <int pending, int head_dim>
TANDEM_DEVICE PackedRow<head_dim> fetched_row(const ptx::Vec4* from, int t) {
  const int thread = static_cast<int>(ptx::thread_index());
  ptx::wait_for_copy_groups<pending>();
  PackedRow<head_dim> packed;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    const ptx::Vec4 v = ptx::load_shared(from + j * quantize_threads + thread);
    packed.words[j][0] = v.x;
    packed.words[j][1] = v.y;
    packed.words[j][2] = v.z;
    packed.words[j][3] = v.w;
  }
  apply_signs(packed, pair_signs(t));
  return packed;
}

/// Sum over a row of its s8 values times those of `other`, which has its signs already, rotated. It need not
/// have the CPU's bits, so the tensor cores rotate it: 64 channels (bit 6 of a channel, two of a thread's
/// vectors, are rows 8 apart of their operand), whose last level, between these, is left to the threads.
/// That and the dot product are 160 instructions a thread; rotate's are 290 before the product.
template <QuantizeConfig C, int head_dim>
TANDEM_DEVICE float rotated_dot(const QuantizedRow<head_dim>& values, const PackedRow<head_dim>& other,
                                int lane) {
  constexpr u32 ones = C.element == Element::bf16 ? 0x3f803f80U : 0x3c003c00U;
  // An entry of the matrix is negative if its row and column have an odd number of bits in common. Bits 0, 3
  // and 4 of the row are of the thread (and the half of the word), those of the column of the lane's four.
  const int column = lane / row_threads;
  const u32 odd = ptx::count_bits(static_cast<u32>(lane % row_threads & column / 2)) % 2;
  const u32 positive = ones ^ (odd != 0 ? 0x80008000U : 0U) ^ (column % 2 != 0 ? 0x80000000U : 0U);
  const u32 negative = positive ^ 0x80008000U;
  float sum = 0.0F;
#pragma unroll
  for (int n = 0; n < 8; ++n) {  // bits 5, 2 and 1 of the rotated channels
    float rotated[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // bits 5 and 2 of the channels
      const u32(&low)[4] = other.words[k / 2];
      const u32(&high)[4] = other.words[k / 2 + 2];
      const int word = k % 2 * 2;
      const auto entry = [&](int bits) {  // bits 2 and 1
        const int common = bits & n % 4;
        return ((common ^ common >> 1 ^ (k / 2 & n / 4)) & 1) != 0 ? negative : positive;
      };
      ptx::mma<C.element>(rotated, {low[word], high[word], low[word + 1], high[word + 1]}, entry(word),
                          entry(word + 1));
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = n % 4 * 2 + e;
      sum = ptx::fma(value_of(values.vectors[n / 4], i), rotated[e] + rotated[2 + e], sum);
      sum = ptx::fma(value_of(values.vectors[n / 4 + 2], i), rotated[e] - rotated[2 + e], sum);
    }
  }
  sum += ptx::shuffle_xor(sum, 1);
  sum += ptx::shuffle_xor(sum, 2);
  return sum * quantizer::rotation_factor(head_dim);
}

/// A thread's row of an item of queries.
struct QueryRow {
  WorkItem item;
  QueryBlocks blocks;
  int row;  ///< in the item
  i64 at;   ///< in the tensor
  bool used;
  QueryTerms terms;
  int head_kv;  ///< among those of all batch entries

  [[nodiscard]] TANDEM_DEVICE tile::GradientUnits units(const EightBitBackwardParams& p) const {
    return {p.maxima, head_kv};
  }
  [[nodiscard]] TANDEM_DEVICE i64 column() const { return static_cast<i64>(blocks.first) * 64; }
};

/// What is found of dO before Q is rounded.
struct DoutTerms {
  float scale;     ///< the block's
  float ds_scale;  ///< E of the block, over which dS is rounded
  float delta;     ///< the row's
  bool bad;        ///< the row is no number
};

/// dO's operands; its tile is left where the rows of dO were.
template <QuantizeConfig C>
TANDEM_DEVICE DoutTerms quantize_dout(const EightBitBackwardParams& p, const Shared& shared,
                                      const QueryRow& r) {
  DoutTerms terms{};
  const int thread = static_cast<int>(ptx::thread_index());
  const int t = thread % row_threads;
  Row<C.head_dim_v> values = unpacked<C>(fetched_row<2, C.head_dim_v>(slots<C>(shared, 0), t));
  quantizer::multiply_by_hadamard(values, t);
  float largest[2] = {0.0F, dlse_of(p, r.item, r.at, r.terms)};
  terms.bad = clear_if_bad(values, largest[0]);
  find_largest(largest, shared.maxima);
  const quantizer::Scale s = block_scale(largest[0]);
  terms.scale = s.stored;
  terms.ds_scale = ptx::fmax(s.stored * r.units(p).v_scale(), tile::dlse_share * largest[1]);
  const QuantizedRow<C.head_dim_v> rounded = quantized(values, s.inverse);
  if (r.used) store_row(p.dout8, r.item, r.at, t, rounded);
  const float unit = tile::power_of_two(-r.units(p).dout_exponent());
  put_row(reinterpret_cast<u32*>(slots<C>(shared, 0)), values, r.terms.number ? r.terms.root * unit : 0.0F);
  const auto out = fetched_row<1, C.head_dim_v>(slots<C>(shared, 1), t);
  terms.delta = rotated_dot<C>(rounded, out, thread % warp_size) * s.stored;
  if (p.dlse != nullptr && r.terms.root > 0.0F)
    terms.delta -= ptx::load_global(p.dlse + quantizer::offset_of(p.dlse_stride, r.item, r.at));
  return terms;
}

/// Q's operands.
struct QTerms {
  float scale;
  float shift;  ///< what the removal of K's mean takes off the row's logits
  bool bad;
};
template <QuantizeConfig C>
TANDEM_DEVICE QTerms quantize_q(const EightBitBackwardParams& p, const Shared& shared, const QueryRow& r,
                                const DoutTerms& dout) {
  QTerms terms{};
  const int t = static_cast<int>(ptx::thread_index()) % row_threads;
  Row<C.head_dim_qk> values = unpacked<C>(fetched_row<0, C.head_dim_qk>(slots<C>(shared, 2), t));
  if constexpr (C.smooth_k) terms.shift = quantizer::dot(values, shared.mean, t) * p.quantize.scale;
  quantizer::multiply_by_hadamard(values, t);
  float largest[1];
  terms.bad = clear_if_bad(values, largest[0]);
  find_largest(largest, shared.maxima + gradient_maxima_bytes / 8);  // dO's may still be read
  const quantizer::Scale s = block_scale(largest[0]);
  terms.scale = s.stored;
  if (r.used) store_row(p.quantize.q, r.item, r.at, t, quantized(values, s.inverse));
  // dO's tile is complete, and all threads have read their parts of O, since the scale was found.
  store_tile<C.head_dim_v>(reinterpret_cast<const u32*>(slots<C>(shared, 0)), p.dout_t,
                           r.item.head * p.dout_t.head + r.column(), r.blocks.count * 64);
  auto* const tile = reinterpret_cast<u32*>(slots<C>(shared, 1));
  const float unit = tile::power_of_two(-r.units(p).q_exponent());
  const bool number = r.terms.number && !dout.bad;
  put_row(tile, values, number ? r.terms.root * unit * dout.ds_scale : 0.0F);
  ptx::sync_block();
  store_tile<C.head_dim_qk>(tile, p.q_t, r.item.head * p.q_t.head + r.column(), r.blocks.count * 64);
  return terms;
}

/// A row's terms, for the main kernel and for the conversion of dQ.
TANDEM_DEVICE void store_terms(const EightBitBackwardParams& p, const QueryRow& r, const DoutTerms& dout,
                               const QTerms& q) {
  const QueryTerms& terms = r.terms;
  const bool number = terms.number && !dout.bad && !q.bad;
  const i64 at = r.blocks.number * 64 + r.row;
  const float lse = ptx::fma(terms.lse - q.shift, tile::log2_e, terms.exponent - 8.0F);
  ptx::store_global(p.lse_log2 + at, terms.root == 0.0F ? ptx::infinity() : number ? lse : ptx::quiet_nan());
  const bool has_delta = number && terms.root > 0.0F && dout.ds_scale > 0.0F;
  ptx::store_global(p.delta + at, has_delta ? dp_factor * dout.delta / dout.ds_scale : 0.0F);
  ptx::store_global(p.row_factors + at, terms.root * dout.ds_scale);
}

}  // namespace gradients

/// A CTA for 128 rows of a query head. Two a multiprocessor: one loads its rows, all of them at its beginning,
/// while the other computes.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads, 2)
    quantize_queries(const __grid_constant__ EightBitBackwardParams p) {
  using namespace gradients;
  QueryRow r;
  if (!quantizer::locate<C>(quantizer::query_side(p.quantize), static_cast<int>(ptx::block_index()), r.item))
    return;
  const Shared shared = shared_memory<C>();
  const int thread = static_cast<int>(ptx::thread_index());
  r.row = row_of_thread<RowOrder::queries>(thread);
  r.at = r.item.begin + static_cast<i64>(r.item.first + r.row);
  r.used = r.item.first + r.row < r.item.used;
  const auto fetch = [&](int tensor, const void* data, const Strides& stride) {
    fetch_row<C, C.head_dim_v>(slots<C>(shared, tensor), row_at(data, stride, r.item, r.at), r.used);
  };
  static_assert(C.head_dim_qk == C.head_dim_v);
  fetch(0, p.dout8.source, p.dout8.stride);
  fetch(1, p.out, p.out_stride);
  fetch(2, p.quantize.q.source, p.quantize.q.stride);
  store_mean<C>(p, shared, r.item.batch, r.item.head / p.quantize.group);
  r.blocks = query_blocks(p, r.item);
  r.head_kv = r.item.batch * p.heads_kv + r.item.head / p.quantize.group;
  r.terms = query_terms(p, r.item, r.at, r.used);
  const DoutTerms dout = quantize_dout<C>(p, shared, r);
  const QTerms q = quantize_q<C>(p, shared, r, dout);
  if (thread < r.blocks.count) {
    const float of_dout = dout.ds_scale > 0.0F ? dp_factor * dout.scale / dout.ds_scale : 0.0F;
    ptx::store_global(reinterpret_cast<ptx::Float4*>(p.q_scales) + r.blocks.number + thread,
                      ptx::Float4{q.scale, of_dout, 0.0F, 0.0F});
  }
  if (thread % row_threads == 0 && r.row < r.blocks.count * 64) store_terms(p, r, dout, q);
}

}  // namespace tandem
