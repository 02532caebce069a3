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

/// One of eight s8 values. Its byte, raised by 128, is the last of a float whose unit is 1. `unit` is such a
/// float, in a register.
TANDEM_DEVICE float value_of(const quantizer::Quantized8& eight, int i, u32 unit) {
  const u32 raised = (i < 4 ? eight.low : eight.high) ^ 0x80808080U;
  const u32 bits = ptx::permute_bytes(raised, unit, 0x7440U | static_cast<u32>(i % 4));
  return ptx::float_of(bits) - (0x1p23F + 128.0F);
}

/// Where a thread keeps its parts of rows while others are rounded, for itself alone.
template <QuantizeConfig C>
TANDEM_DEVICE ptx::Vec4* slots(const Shared& shared, int tensor) {
  return reinterpret_cast<ptx::Vec4*>(shared.rest) + tensor * (Row<C.head_dim_v>::vectors * quantize_threads);
}
/// Where rows of `tensor` were before.
template <QuantizeConfig C>
TANDEM_DEVICE u32* tile_at(const Shared& shared, int tensor) {
  return reinterpret_cast<u32*>(slots<C>(shared, tensor));
}
/// Starts copying the thread's part of a row there, as a group of copies; 0 unless `used`.
template <QuantizeConfig C, int head_dim>
TANDEM_DEVICE void fetch_row(ptx::Vec4* to, const u16* row, bool used) {
  const int thread = static_cast<int>(ptx::thread_index());
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    const int t = thread % row_threads;
    ptx::Vec4* const slot = to + thread + j * quantize_threads;
    if constexpr (C.vectors) {
      ptx::copy_async_or_zero(slot, reinterpret_cast<const ptx::Vec4*>(row + 8 * t) + 4 * j, used);
    } else {
      ptx::store_shared(slot, quantizer::load_elements(row, (4 * j + t) * 8, head_dim, used));
    }
  }
  ptx::commit_copies();
}
/// The thread's part of a tensor's row, with the signs of the rotation, when all groups of copies but the
/// last `pending` are there.
template <QuantizeConfig C, int pending>
TANDEM_DEVICE PackedRow<C.head_dim_v> fetched_row(const Shared& shared, int tensor) {
  const int thread = static_cast<int>(ptx::thread_index());
  ptx::wait_for_copy_groups<pending>();
  PackedRow<C.head_dim_v> packed;
#pragma unroll
  for (int j = 0; j < Row<C.head_dim_v>::vectors; ++j)
    packed.set(j, ptx::load_shared(slots<C>(shared, tensor) + thread + j * quantize_threads));
  apply_signs(packed, shared, thread % row_threads);
  return packed;
}

/// Sum over a row of its s8 values times those of `other`, which has its signs already, rotated. It need not
/// have the CPU's bits, so the tensor cores do the four levels of bits 0, 1, 3 and 4 of a channel, those of a
/// word, of neighbouring words and of the row's threads, and in two vectors at once (the highest bit). That
/// takes 8 instructions of 128 dimensions; the threads themselves would take 290 for all levels.
template <QuantizeConfig C, int head_dim>
TANDEM_DEVICE float rotated_dot(const QuantizedRow<head_dim>& values, const PackedRow<head_dim>& other,
                                int lane) {
  // An entry of the matrix is negative if its row and column have an odd number of bits in common.
  const int row = lane % row_threads;
  const int column = lane / row_threads;
  const bool odd = ptx::count_bits(static_cast<u32>(row & column / 2)) % 2 != 0;
  const u32 ones = C.element == Element::bf16 ? 0x3f803f80U : 0x3c003c00U;
  const u32 positive = ones ^ (odd ? 0x80008000U : 0U) ^ (column % 2 != 0 ? 0x80000000U : 0U);
  const u32 negative = positive ^ 0x80008000U;
  const auto unit = static_cast<u32>(ptx::forgotten(0x4B000000));
  float sum = 0.0F;
#pragma unroll
  for (int n = 0; n < 2; ++n) {  // bit 1 of a channel that results
    constexpr int vectors = Row<head_dim>::vectors;
    float x[vectors][4] = {};
#pragma unroll
    for (int k = 0; k < vectors; ++k) {  // bit 2, and of 128 dimensions 5
      const u32(&low)[4] = other.words[k / 2];
      const u32(&high)[4] = other.words[k / 2 + vectors / 2];
      const int w = k % 2 * 2;
      ptx::mma<C.element>(x[k], {low[w], high[w], low[w + 1], high[w + 1]}, positive,
                          n == 0 ? positive : negative);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {  // bit 0
      float y[2 * vectors];        // bit 2, and all from 5 on
#pragma unroll
      for (int m = 0; m < 2 * vectors; ++m) y[m] = x[m % vectors][m / vectors * 2 + e];
      quantizer::butterflies(y);
#pragma unroll
      for (int m = 0; m < 2 * vectors; ++m)
        sum = ptx::fma(value_of(values.vectors[m / 2], m % 2 * 4 + 2 * n + e, unit), y[m], sum);
    }
  }
  sum += ptx::shuffle_xor(sum, 1);
  sum += ptx::shuffle_xor(sum, 2);
  return sum * quantizer::rotation_factor(head_dim);
}

/// What a thread keeps in shared memory, as registers have no room for it: its row's terms, and the number of
/// the KV head among those of all batch entries.
template <QuantizeConfig C>
struct Kept {
  float* at;

  TANDEM_DEVICE explicit Kept(const Shared& shared)
      : at(reinterpret_cast<float*>(shared.rest + gradient_queries_bytes(C) - gradient_rows_bytes(C)) -
           3 * quantize_threads + ptx::thread_index_anew()) {}
  TANDEM_DEVICE void set(const QueryTerms& terms, int head_kv) const {
    set_lse(terms.lse);
    ptx::store_shared(at + quantize_threads, terms.exponent);
    ptx::store_shared(reinterpret_cast<int*>(at + 2 * quantize_threads), head_kv);
  }
  TANDEM_DEVICE void set_lse(float lse) const { ptx::store_shared(at, lse); }
  [[nodiscard]] TANDEM_DEVICE QueryTerms terms() const {
    return {ptx::load_shared(at), ptx::load_shared(at + quantize_threads)};
  }
  [[nodiscard]] TANDEM_DEVICE tile::GradientUnits units(const EightBitBackwardParams& p) const {
    return {p.maxima, ptx::load_shared(reinterpret_cast<const int*>(at + 2 * quantize_threads))};
  }
};

/// A thread's row of an item of queries. What follows from the thread's number is made again where it is
/// used: the registers are needed for the row's values.
struct QueryRow {
  WorkItem item;

  [[nodiscard]] TANDEM_DEVICE static int thread() { return static_cast<int>(ptx::thread_index_anew()); }
  /// In the item.
  [[nodiscard]] TANDEM_DEVICE static int row() { return row_of_thread<RowOrder::queries>(thread()); }
  /// In the tensor.
  [[nodiscard]] TANDEM_DEVICE i64 at() const { return item.begin + static_cast<i64>(item.first + row()); }
  [[nodiscard]] TANDEM_DEVICE bool used() const { return item.first + row() < item.used; }
};

/// The item in uniform registers, so that a row's values have the others.
TANDEM_DEVICE WorkItem of_warp(const WorkItem& item) {
  return {.batch = ptx::warp_uniform(item.batch),
          .entry = ptx::warp_uniform(item.entry),
          .head = ptx::warp_uniform(item.head),
          .first = ptx::warp_uniform(item.first),
          .begin = ptx::warp_uniform(item.begin),
          .used = ptx::warp_uniform(item.used),
          .block = item.block,
          .blocks = item.blocks};
}
TANDEM_DEVICE float of_warp(float x) {
  return ptx::float_of(static_cast<u32>(ptx::warp_uniform(static_cast<int>(ptx::bits_of(x)))));
}

/// dO's operands, of which the tile is left where the rows of dO were; delta, and the factors of dS and dQ.
/// Returns E of the block, over which dS is rounded. A row that is no number has a NaN as LSE from here on.
template <QuantizeConfig C>
TANDEM_DEVICE float quantize_dout(const EightBitBackwardParams& p, const Shared& shared, const QueryRow& r) {
  Row<C.head_dim_v> values = unpacked<C>(fetched_row<C, 2>(shared, 0));
  quantizer::multiply_by_hadamard(values, QueryRow::thread() % row_threads);
  float largest[2] = {0.0F, dlse_of(p, r.item, r.at(), Kept<C>(shared).terms())};
  const bool bad = clear_if_bad(values, largest[0]);
  find_largest(largest, shared.maxima);
  const quantizer::Scale s = block_scale(largest[0]);
  const float ds_scale =
      of_warp(ptx::fmax(s.stored * Kept<C>(shared).units(p).v_scale(), tile::dlse_share * largest[1]));
  const float unit = tile::power_of_two(-Kept<C>(shared).units(p).dout_exponent());
  const QuantizedRow<C.head_dim_v> rounded =
      store_row(quantized_at(p.dout8, r.item, r.at(), QueryRow::thread() % row_threads), r.used(),
                tile_at<C>(shared, 0), values, s.inverse, Kept<C>(shared).terms().factor() * unit);
  if (bad) Kept<C>(shared).set_lse(ptx::quiet_nan());

  const auto out = fetched_row<C, 1>(shared, 1);
  float delta = rotated_dot<C>(rounded, out, QueryRow::thread() % warp_size) * s.stored;
  const int thread = QueryRow::thread();
  const QueryBlocks<C> blocks(p, r.item);
  if (thread < blocks.count) {
    const float of_dout = ds_scale > 0.0F ? dp_factor * s.stored / ds_scale : 0.0F;
    ptx::store_global(p.q_scales + 4 * (blocks.number + thread) + 1, of_dout);
  }
  if (thread % row_threads == 0 && QueryRow::row() < blocks.count * blocks.rows) {
    const QueryTerms terms = Kept<C>(shared).terms();
    if (p.dlse != nullptr && terms.sees())
      delta -= ptx::load_global(p.dlse + quantizer::offset_of(p.dlse_stride, r.item, r.at()));
    const bool has_delta = terms.number() && terms.sees() && ds_scale > 0.0F;
    const i64 at = blocks.number * blocks.rows + QueryRow::row();
    ptx::store_global(p.delta + at, has_delta ? dp_factor * delta / ds_scale : 0.0F);
    ptx::store_global(p.row_factors + at, terms.root() * ds_scale);
  }
  return ds_scale;
}

/// Q's operands, its scale, and what the main kernel takes off the row's logits.
template <QuantizeConfig C>
TANDEM_DEVICE void quantize_q(const EightBitBackwardParams& p, const Shared& shared, const QueryRow& r,
                              float ds_scale) {
  Row<C.head_dim_qk> values = unpacked<C>(fetched_row<C, 0>(shared, 2));
  if constexpr (C.smooth_k) {  // what the removal of K's mean has taken off the row's logits
    const float off = quantizer::dot(values, shared.mean, QueryRow::thread() % row_threads);
    const Kept<C> kept(shared);
    kept.set_lse(kept.terms().lse - off * p.quantize.scale);
  }
  quantizer::multiply_by_hadamard(values, QueryRow::thread() % row_threads);
  float largest[1];
  const bool bad = clear_if_bad(values, largest[0]);
  find_largest(largest, shared.maxima + gradient_maxima_bytes / 8);  // dO's may still be read
  const quantizer::Scale s = block_scale(largest[0]);
  const float unit = tile::power_of_two(-Kept<C>(shared).units(p).q_exponent());
  // dO's tile is complete, and all threads have read their parts of O, since the scale was found.
  store_row(quantized_at(p.quantize.q, r.item, r.at(), QueryRow::thread() % row_threads), r.used(),
            tile_at<C>(shared, 1), values, s.inverse, Kept<C>(shared).terms().factor() * unit * ds_scale);
  const QueryBlocks<C> blocks(p, r.item);
  const auto store = [&](int tile, const TransposedOperand& x) {
    store_tile<C.head_dim_qk>(tile_at<C>(shared, tile), x,
                              r.item.head * x.head + static_cast<i64>(blocks.first) * blocks.rows,
                              blocks.rows * blocks.count);
  };
  store(0, p.dout_t);
  ptx::sync_block();
  store(1, p.q_t);
  const int thread = QueryRow::thread();
  if (thread < blocks.count) ptx::store_global(p.q_scales + 4 * (blocks.number + thread), s.stored);
  if (thread % row_threads != 0 || QueryRow::row() >= blocks.count * blocks.rows) return;
  const QueryTerms terms = Kept<C>(shared).terms();
  const float lse = bad ? ptx::quiet_nan() : ptx::fma(terms.lse, tile::log2_e, terms.exponent - 8.0F);
  ptx::store_global(p.lse_log2 + blocks.number * blocks.rows + QueryRow::row(),
                    terms.sees() ? lse : ptx::infinity());
}

}  // namespace gradients

/// A CTA for 128 rows of a query head. Two a multiprocessor, where registers suffice: one loads its rows, all
/// of them at its beginning, while the other computes.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads, C.vectors && !C.varlen ? 2 : 1)
    quantize_queries(const __grid_constant__ EightBitBackwardParams p) {
  using namespace gradients;
  QueryRow r;
  if (!quantizer::locate<C>(quantizer::query_side(p.quantize), static_cast<int>(ptx::block_index()), r.item))
    return;
  r.item = of_warp(r.item);
  const int head_kv = r.item.head / p.quantize.group;
  const Shared shared = shared_memory<C>();
  const auto fetch = [&](int tensor, const void* data, const Strides& stride) {
    fetch_row<C, C.head_dim_v>(slots<C>(shared, tensor), row_at(data, stride, r.item, r.at()), r.used());
  };
  static_assert(C.head_dim_qk == C.head_dim_v);
  fetch(0, p.dout8.source, p.dout8.stride);
  fetch(1, p.out, p.out_stride);
  fetch(2, p.quantize.q.source, p.quantize.q.stride);
  store_signs(shared);
  store_mean<C>(p, shared, r.item.batch, head_kv);
  Kept<C>(shared).set(query_terms(p, r.item, r.at(), r.used()), r.item.batch * p.heads_kv + head_kv);
  ptx::sync_block();
  const float ds_scale = quantize_dout<C>(p, shared, r);
  quantize_q<C>(p, shared, r, ds_scale);
}

}  // namespace tandem
