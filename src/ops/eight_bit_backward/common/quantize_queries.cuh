// What the 8-bit backward kernel multiplies of queries: Q and dO as rows of s8 values, for S and dP, and
// transposed in e4m3, for dK and dV; with them the rows' terms. quantize_keys.cuh comes before. Bound by
// memory: Q, O and dO are read once. docs/numerics.md has the recipe.
//
// s8 has no NaN. A row of Q or dO with a NaN or an infinity is 0 in every operand, and its LSE becomes a NaN,
// which reaches what it sees.
#pragma once

#include "ops/eight_bit_backward/common/gradient_rows.cuh"

namespace tandem {

namespace gradients {

/// Sum over a row of its s8 values times those of `other`, which has not been rounded.
template <int head_dim>
TANDEM_DEVICE float dot(const QuantizedRow<head_dim>& values, const Row<head_dim>& other) {
  float sum = 0.0F;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 word = i < 4 ? values.vectors[j].low : values.vectors[j].high;
      const i32 value = static_cast<i32>(word << (24 - i % 4 * 8)) >> 24;
      sum = ptx::fma(ptx::to_float(value), other.x[j][i], sum);
    }
  }
  sum += ptx::shuffle_xor(sum, 1);
  return sum + ptx::shuffle_xor(sum, 2);
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

/// dO's operands.
template <QuantizeConfig C>
TANDEM_DEVICE DoutTerms quantize_dout(const EightBitBackwardParams& p, const quantizer::Tables& table,
                                      const QueryRow& r) {
  DoutTerms terms{};
  const int t = static_cast<int>(ptx::thread_index()) % quantizer::row_threads;
  Row<C.head_dim_v> values;
  load_row<C>(values, row_at(p.dout8.source, p.dout8.stride, r.item, r.at), t, r.used);
  quantizer::rotate(values, t);
  float largest = 0.0F;
  terms.bad = clear_if_bad(values, largest);
  const quantizer::Scale s = block_scale(table, largest, 0);
  terms.scale = s.stored;
  terms.ds_scale = s.stored * r.units(p).v_scale();
  if (p.dlse != nullptr) {
    const float of_dlse = largest_of_rows(table, dlse_of(p, r.item, r.at, r.terms), 1);
    terms.ds_scale = ptx::fmax(terms.ds_scale, tile::dlse_share * of_dlse);
    ptx::sync_block();  // the second buffer of the largest is used again for Q
  }
  const QuantizedRow<C.head_dim_v> rounded = quantized(values, s.inverse);
  if (r.used) store_row(p.dout8, r.item, r.at, t, rounded);
  const float unit = tile::power_of_two(-r.units(p).dout_exponent());
  put_row(table, values, r.terms.number ? r.terms.root * unit : 0.0F);
  Row<C.head_dim_v> out;
  load_row<C>(out, row_at(p.out, p.out_stride, r.item, r.at), t, r.terms.root > 0.0F);
  quantizer::rotate(out, t);
  terms.delta = dot(rounded, out) * s.stored;
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
TANDEM_DEVICE QTerms quantize_q(const EightBitBackwardParams& p, const quantizer::Tables& table,
                                const QueryRow& r, const DoutTerms& dout) {
  QTerms terms{};
  const int thread = static_cast<int>(ptx::thread_index());
  const int t = thread % quantizer::row_threads;
  const float* const mean = load_mean<C>(p, r.item.batch, r.item.head / p.quantize.group);
  Row<C.head_dim_qk> values;
  load_row<C>(values, row_at(p.quantize.q.source, p.quantize.q.stride, r.item, r.at), t, r.used);
  if constexpr (C.smooth_k) terms.shift = quantizer::dot(values, mean, t) * p.quantize.scale;
  quantizer::rotate(values, t);
  float largest = 0.0F;
  terms.bad = clear_if_bad(values, largest);
  const quantizer::Scale s = block_scale(table, largest, 1);
  terms.scale = s.stored;
  if (r.used) store_row(p.quantize.q, r.item, r.at, t, quantized(values, s.inverse));
  // dO's tile has been complete since the scale was found.
  store_tile<C.head_dim_v>(table, p.dout_t, r.item.head * p.dout_t.head + r.column(), r.blocks.count * 64);
  ptx::sync_block();
  const float unit = tile::power_of_two(-r.units(p).q_exponent());
  const bool number = r.terms.number && !dout.bad;
  put_row(table, values, number ? r.terms.root * unit * dout.ds_scale : 0.0F);
  ptx::sync_block();
  store_tile<C.head_dim_qk>(table, p.q_t, r.item.head * p.q_t.head + r.column(), r.blocks.count * 64);
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

/// A CTA for 128 rows of a query head. Two a multiprocessor would leave 64 registers a thread, and spill 220
/// bytes.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads, 1)
    quantize_queries(const __grid_constant__ EightBitBackwardParams p) {
  using namespace gradients;
  QueryRow r;
  if (!quantizer::locate<C>(quantizer::query_side(p.quantize), static_cast<int>(ptx::block_index()), r.item))
    return;
  const quantizer::Tables table = quantizer::tables<C>();
  const int thread = static_cast<int>(ptx::thread_index());
  r.blocks = query_blocks(p, r.item);
  r.row = row_of_thread<RowOrder::queries>(thread);
  r.at = r.item.begin + static_cast<i64>(r.item.first + r.row);
  r.used = r.item.first + r.row < r.item.used;
  r.head_kv = r.item.batch * p.heads_kv + r.item.head / p.quantize.group;
  r.terms = query_terms(p, r.item, r.at, r.used);
  const DoutTerms dout = quantize_dout<C>(p, table, r);
  const QTerms q = quantize_q<C>(p, table, r, dout);
  if (thread < r.blocks.count) {
    const float of_dout = dout.ds_scale > 0.0F ? dp_factor * dout.scale / dout.ds_scale : 0.0F;
    ptx::store_global(reinterpret_cast<ptx::Float4*>(p.q_scales) + r.blocks.number + thread,
                      ptx::Float4{q.scale, of_dout, 0.0F, 0.0F});
  }
  if (thread % quantizer::row_threads == 0 && r.row < r.blocks.count * 64) store_terms(p, r, dout, q);
}

}  // namespace tandem
