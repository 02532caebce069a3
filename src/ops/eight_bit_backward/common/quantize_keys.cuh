// Before the quantiser of queries of the 8-bit backward pass: K and V in 8 bits, and how large the rows of
// queries are that dV and dK are sums of, by head of K and V. Clears the sums of dQ, too. Bound by memory: K,
// V, Q and dO are read once.
#pragma once

#include "ops/eight_bit_backward/common/gradient_rows.cuh"
#include "ptx/mma.cuh"

namespace tandem {

namespace gradients {

/// K's operands: rows without the mean, and twice the same over their scale transposed (at most 254).
template <QuantizeConfig C>
TANDEM_DEVICE void quantize_k(const EightBitBackwardParams& p, int number) {
  WorkItem item;
  if (!quantizer::locate<C>(quantizer::key_side(p.quantize), number, item)) return;
  const Shared shared = shared_memory<C>();
  const int thread = static_cast<int>(ptx::thread_index());
  const int t = thread % row_threads;
  const QuantizedTensor& x = p.quantize.k;
  const int row = row_of_thread<RowOrder::keys>(thread);
  const i64 at = item.begin + static_cast<i64>(item.first + row);
  const bool used = item.first + row < item.used;
  auto packed = load_row<C, C.head_dim_qk>(row_at(x.source, x.stride, item, at), t, used);
  store_signs(shared);
  store_mean<C>(p, shared, item.batch, item.head);
  ptx::sync_block();
  apply_signs(packed, shared, t);
  Row<C.head_dim_qk> values = unpacked<C>(packed);
  if (C.smooth_k && used) quantizer::subtract(values, shared.mean, t);
  quantizer::multiply_by_hadamard(values, t);
  float largest[1];
  clear_if_bad(values, largest[0]);
  find_largest(largest, shared.maxima);
  const quantizer::Scale s = block_scale(largest[0]);
  if (thread == 0)
    ptx::store_global(x.scales + quantizer::offset_of(x.scale_stride, item, item.block), s.stored);
  auto* const tile = reinterpret_cast<u32*>(shared.rest);
  store_row(quantized_at(x, item, at, t), used, tile, values, s.inverse, 2.0F * s.inverse);
  ptx::sync_block();
  store_tile<C.head_dim_qk>(
      tile, p.k_t,
      item.entry * p.k_t.batch + item.head * p.k_t.head + static_cast<i64>(item.block) * quant_block,
      quant_block);
}

/// V's operand. The scale of a block with a NaN is a NaN: dS is one for all of its keys.
template <QuantizeConfig C>
TANDEM_DEVICE void quantize_v(const EightBitBackwardParams& p, int number) {
  WorkItem item;
  if (!quantizer::locate<C>(quantizer::key_side(p.quantize), number, item)) return;
  const Shared shared = shared_memory<C>();
  const int thread = static_cast<int>(ptx::thread_index());
  const int t = thread % row_threads;
  const QuantizedTensor& x = p.quantize.v;
  const int row = row_of_thread<RowOrder::rows>(thread);
  const i64 at = item.begin + static_cast<i64>(item.first + row);
  const bool used = item.first + row < item.used;
  auto packed = load_row<C, C.head_dim_v>(row_at(x.source, x.stride, item, at), t, used);
  store_signs(shared);
  ptx::sync_block();
  apply_signs(packed, shared, t);
  Row<C.head_dim_v> values = unpacked<C>(packed);
  quantizer::multiply_by_hadamard(values, t);
  float largest[2];
  largest[1] = clear_if_bad(values, largest[0]) ? 1.0F : 0.0F;
  find_largest(largest, shared.maxima);
  const bool any_bad = largest[1] > 0.0F;
  const quantizer::Scale s = block_scale(largest[0]);
  if (thread == 0) {
    ptx::store_global(x.scales + quantizer::offset_of(x.scale_stride, item, item.block),
                      any_bad ? ptx::quiet_nan() : s.stored);
    if (!any_bad) ptx::atomic_max(p.maxima.v + item.batch * p.heads_kv + item.head, ptx::bits_of(s.stored));
  }
  if (!used) return;
  u64* const to = quantized_at(x, item, at, t);
#pragma unroll
  for (int j = 0; j < Row<C.head_dim_v>::vectors; ++j)
    ptx::store_global(to + 4 * j, as_one(quantizer::encode<OperandType::s8>(values.x[j], s.inverse, false)));
}

/// The Euclidean norm of the row, on one of its threads; infinite or a NaN if it is no number. The others
/// get that of another product: the tensor cores multiply a warp's eight rows by one another, and of these
/// products a row's with itself is in column row of 8, two columns a thread. That is 8 instructions of 128
/// dimensions, and 64 without the tensor cores.
template <QuantizeConfig C, int head_dim>
TANDEM_DEVICE float norm_of(const PackedRow<head_dim>& row, int lane) {
  float products[4] = {};
#pragma unroll
  for (int k = 0; k < 2 * Row<head_dim>::vectors; ++k) {
    const u32 low = row.words[k / 2][k % 2 * 2];
    const u32 high = row.words[k / 2][k % 2 * 2 + 1];
    ptx::mma<C.element>(products, {low, 0, high, 0}, low, high);
  }
  return ptx::square_root(lane / row_threads % 2 == 0 ? products[0] : products[1]);
}
TANDEM_DEVICE bool has_norm(int lane) {
  return lane % row_threads == lane / row_threads / 2;
}

/// The largest values of an item of queries.
template <QuantizeConfig C>
TANDEM_DEVICE void find_maxima(const EightBitBackwardParams& p, int number) {
  WorkItem item;
  if (!quantizer::locate<C>(quantizer::query_side(p.quantize), number, item)) return;
  const Shared shared = shared_memory<C>();
  const int thread = static_cast<int>(ptx::thread_index());
  const int lane = thread % warp_size;
  const int row = row_of_thread<RowOrder::rows>(thread);
  const i64 at = item.begin + static_cast<i64>(item.first + row);
  const bool used = item.first + row < item.used;
  const int t = thread % row_threads;
  const auto queries =
      load_row<C, C.head_dim_qk>(row_at(p.quantize.q.source, p.quantize.q.stride, item, at), t, used);
  const auto of_out = load_row<C, C.head_dim_v>(row_at(p.dout8.source, p.dout8.stride, item, at), t, used);
  const QueryTerms terms = query_terms(p, item, at, used);

  const QueryBlocks<C> blocks(p, item);
  constexpr int sums = blocks.rows * C.head_dim_qk;
  auto* const cleared = reinterpret_cast<ptx::Vec4*>(p.dq_sum + blocks.number * sums);
#pragma unroll
  for (int i = 0; i < blocks.most * sums / 4; i += quantize_threads) {
    if (i < blocks.count * sums / 4) ptx::store_global(cleared + i + thread, ptx::Vec4{0, 0, 0, 0});
  }

  const float q = norm_of<C>(queries, lane);
  const float dout = norm_of<C>(of_out, lane);
  const bool counts = has_norm(lane) && terms.sees() && terms.number() && q - q + dout - dout == 0.0F;
  enum : int { dout_r, q_r, plain_dout, dlse };
  float largest[4] = {counts ? dout * terms.root() : 0.0F, counts ? q * terms.root() : 0.0F,
                      counts ? dout : 0.0F, dlse_of(p, item, at, terms)};
  find_largest(largest, shared.maxima);
  if (thread != 0) return;
  const int head = item.batch * p.heads_kv + item.head / p.quantize.group;
  ptx::atomic_max(p.maxima.dout + head, ptx::bits_of(largest[dout_r]));
  ptx::atomic_max(p.maxima.q_dout + head, ptx::bits_of(largest[q_r] * largest[plain_dout]));
  if (p.dlse != nullptr) ptx::atomic_max(p.maxima.q_dlse + head, ptx::bits_of(largest[q_r] * largest[dlse]));
}

}  // namespace gradients

/// A CTA for each work item: 128 rows of a head of K, of V, or of queries. They come in turn, as long as
/// there are all three: what is read for the largest values, which take little arithmetic, and cleared, is on
/// its way while K and V are rotated.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads, C.vectors ? 2 : 1)
    quantize_keys(const __grid_constant__ EightBitBackwardParams p) {
  const int number = static_cast<int>(ptx::block_index());
  const int keys = p.quantize.items_k;
  const int all_three = 3 * min(keys, p.quantize.items_q);
  // From where on there are K and V alone, or queries alone.
  const int rest = number - all_three;
  const int kinds = rest < 0 ? 3 : keys > p.quantize.items_q ? 2 : 1;
  const int at = rest < 0 ? number : rest;
  const int item = at / kinds + (rest < 0 ? 0 : all_three / 3);
  const int kind = kinds == 1 ? 2 : at % kinds;
  if (kind == 0) {
    gradients::quantize_k<C>(p, item);
  } else if (kind == 1) {
    gradients::quantize_v<C>(p, item);
  } else {
    gradients::find_maxima<C>(p, item);
  }
}

}  // namespace tandem
