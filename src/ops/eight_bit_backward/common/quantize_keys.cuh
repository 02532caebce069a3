// Before the quantiser of queries of the 8-bit backward pass: K and V in 8 bits, and how large the rows of
// queries are that dV and dK are sums of, by head of K and V. Clears the sums of dQ, too. Bound by memory: K,
// V, Q and dO are read once.
#pragma once

#include "ops/eight_bit_backward/common/gradient_rows.cuh"

namespace tandem {

namespace gradients {

/// K's operands: rows without the mean, and twice the same over their scale transposed (at most 254).
template <QuantizeConfig C>
TANDEM_DEVICE void quantize_k(const EightBitBackwardParams& p, int number) {
  WorkItem item;
  if (!quantizer::locate<C>(quantizer::key_side(p.quantize), number, item)) return;
  const quantizer::Tables table = quantizer::tables<C>();
  const int thread = static_cast<int>(ptx::thread_index());
  const int t = thread % quantizer::row_threads;
  const QuantizedTensor& x = p.quantize.k;
  const float* const mean = load_mean<C>(p, item.batch, item.head);
  const int row = row_of_thread<RowOrder::keys>(thread);
  const i64 at = item.begin + static_cast<i64>(item.first + row);
  const bool used = item.first + row < item.used;
  Row<C.head_dim_qk> values;
  load_row<C>(values, row_at(x.source, x.stride, item, at), t, used);
  if (C.smooth_k && used) quantizer::subtract(values, mean, t);
  quantizer::rotate(values, t);
  float largest = 0.0F;
  clear_if_bad(values, largest);
  const quantizer::Scale s = block_scale(table, largest, 0);
  if (thread == 0)
    ptx::store_global(x.scales + quantizer::offset_of(x.scale_stride, item, item.block), s.stored);
  if (used) store_row(x, item, at, t, quantized(values, s.inverse));
  put_row(table, values, 2.0F * s.inverse);
  ptx::sync_block();
  store_tile<C.head_dim_qk>(
      table, p.k_t,
      item.entry * p.k_t.batch + item.head * p.k_t.head + static_cast<i64>(item.block) * quant_block,
      quant_block);
}

/// V's operand. The scale of a block with a NaN is a NaN: dS is one for all of its keys.
template <QuantizeConfig C>
TANDEM_DEVICE void quantize_v(const EightBitBackwardParams& p, int number) {
  WorkItem item;
  if (!quantizer::locate<C>(quantizer::key_side(p.quantize), number, item)) return;
  const quantizer::Tables table = quantizer::tables<C>();
  const int thread = static_cast<int>(ptx::thread_index());
  const int t = thread % quantizer::row_threads;
  const QuantizedTensor& x = p.quantize.v;
  const int row = row_of_thread<RowOrder::rows>(thread);
  const i64 at = item.begin + static_cast<i64>(item.first + row);
  const bool used = item.first + row < item.used;
  Row<C.head_dim_v> values;
  load_row<C>(values, row_at(x.source, x.stride, item, at), t, used);
  quantizer::rotate(values, t);
  float largest = 0.0F;
  const bool bad = clear_if_bad(values, largest);
  const quantizer::Scale s = block_scale(table, largest, 0);
  const bool any_bad = largest_of_rows(table, bad ? 1.0F : 0.0F, 1) > 0.0F;
  if (thread == 0) {
    ptx::store_global(x.scales + quantizer::offset_of(x.scale_stride, item, item.block),
                      any_bad ? ptx::quiet_nan() : s.stored);
    if (!any_bad) ptx::atomic_max(p.maxima.v + item.batch * p.heads_kv + item.head, ptx::bits_of(s.stored));
  }
  if (used) store_row(x, item, at, t, quantized(values, s.inverse));
}

/// The Euclidean norm of a row; infinite or a NaN if it is no number.
template <int head_dim>
TANDEM_DEVICE float norm_of(const Row<head_dim>& row) {
  float sum = 0.0F;
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = ptx::fma(row.x[j][i], row.x[j][i], sum);
  }
  sum += ptx::shuffle_xor(sum, 1);
  sum += ptx::shuffle_xor(sum, 2);
  return sum - sum == 0.0F ? ptx::square_root(sum) : ptx::quiet_nan();
}

/// The largest values of an item of queries.
template <QuantizeConfig C>
TANDEM_DEVICE void find_maxima(const EightBitBackwardParams& p, int number) {
  WorkItem item;
  if (!quantizer::locate<C>(quantizer::query_side(p.quantize), number, item)) return;
  const quantizer::Tables table = quantizer::tables<C>();
  const int thread = static_cast<int>(ptx::thread_index());
  const QueryBlocks blocks = query_blocks(p, item);
  constexpr int sums = EightBitBackwardConfig{}.tiling.block_m * C.head_dim_qk;
  auto* const cleared = reinterpret_cast<ptx::Vec4*>(p.dq_sum + blocks.number * sums);
  for (int i = thread; i < blocks.count * sums / 4; i += quantize_threads)
    ptx::store_global(cleared + i, ptx::Vec4{0, 0, 0, 0});

  const int t = thread % quantizer::row_threads;
  const int row = row_of_thread<RowOrder::rows>(thread);
  const i64 at = item.begin + static_cast<i64>(item.first + row);
  const QueryTerms terms = query_terms(p, item, at, item.first + row < item.used);
  const bool reads = terms.root > 0.0F && terms.number;
  Row<C.head_dim_qk> queries;
  load_row<C>(queries, row_at(p.quantize.q.source, p.quantize.q.stride, item, at), t, reads);
  Row<C.head_dim_v> of_out;
  load_row<C>(of_out, row_at(p.dout8.source, p.dout8.stride, item, at), t, reads);
  float q = norm_of(queries);
  float dout = norm_of(of_out);
  const bool counts = q - q + dout - dout == 0.0F;
  q = counts ? q * terms.root : 0.0F;
  dout = counts ? dout : 0.0F;
  const float largest = largest_of_rows(table, dout * terms.root, 0);
  const float largest_q = largest_of_rows(table, q, 1);
  const float largest_dout = largest_of_rows(table, dout, 0);
  const int head = item.batch * p.heads_kv + item.head / p.quantize.group;
  if (thread == 0) {
    ptx::atomic_max(p.maxima.dout + head, ptx::bits_of(largest));
    ptx::atomic_max(p.maxima.q_dout + head, ptx::bits_of(largest_q * largest_dout));
  }
  if (p.dlse == nullptr) return;
  const float largest_dlse = largest_of_rows(table, dlse_of(p, item, at, terms), 1);
  if (thread == 0) ptx::atomic_max(p.maxima.q_dlse + head, ptx::bits_of(largest_q * largest_dlse));
}

}  // namespace gradients

/// A CTA for each work item: 128 rows of a head of K, then of V, then of queries.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads, 2)
    quantize_keys(const __grid_constant__ EightBitBackwardParams p) {
  int item = static_cast<int>(ptx::block_index());
  if (item < p.quantize.items_k) {
    gradients::quantize_k<C>(p, item);
  } else if (item -= p.quantize.items_k; item < p.quantize.items_v) {
    gradients::quantize_v<C>(p, item);
  } else {
    gradients::find_maxima<C>(p, item - p.quantize.items_v);
  }
}

}  // namespace tandem
