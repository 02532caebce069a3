// 16-bit Q, K and V to 8-bit codes and scales, all three in one launch. Bound by memory: every element is
// read once and its code written once. Before it, where K's mean is removed, one launch over K alone, or a
// sample of it, sums its channels.
//
// A block of threads takes units of 128 rows of a head, as blocks of scales count them. Q and K leave as
// rows; V leaves with keys contiguous, its 4 x 4 bytes exchanged between the four threads whose keys share a
// word, the words through shared memory.
#pragma once

#include "kernels/common/quantize_rotation.cuh"

namespace tandem {

namespace quantizer {

/// Whether rows of Q and K can be marked.
template <QuantizeConfig C>
constexpr bool can_mark_rows = C.qk == Codes::s8&& C.qk_scales == ScaleGroup::block;

/// Eight codes of a row.
template <bool vectors>
TANDEM_DEVICE void store_codes(const QuantizedTensor& x, u8* row, int col, const Codes8& codes) {
  if constexpr (vectors) {
    if (col < x.code_columns) {
      ptx::store_global(reinterpret_cast<u64*>(row + col), static_cast<u64>(codes.high) << 32 | codes.low);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (col + i < x.code_columns) {
        ptx::store_global(row + col + i, static_cast<u8>((i < 4 ? codes.low : codes.high) >> (8 * (i % 4))));
      }
    }
  }
}

/// The key of a unit whose row of V the thread has: a warp has two words of four keys, and its lanes take
/// them in the order in which they are stored.
TANDEM_DEVICE int key_of_thread(int thread) {
  return thread / warp_size / 2 * 16 +
         v_key_of(thread / warp_size % 2 * 8 + thread % warp_size / row_threads);
}

/// A thread's row of a job.
template <QuantizeConfig C>
struct Place {
  const Job* job;
  int row;   ///< of its head
  int slot;  ///< of heads
  bool used;

  /// `row_of_job`: of all heads' slots.
  TANDEM_DEVICE Place(const Job* j, int row_of_job) : job(j), row(of_slot(row_of_job)), slot(0) {
    if constexpr (C.varlen) slot = row_of_job >> ptx::load_shared(&job->shift_of_slot);
    used = slot < heads() && row < ptx::load_shared(&job->rows);
  }
  TANDEM_DEVICE int slot_rows() const {
    return C.varlen ? 1 << ptx::load_shared(&job->shift_of_slot) : quant_block;
  }
  TANDEM_DEVICE int of_slot(int row_of_job) const { return row_of_job & (slot_rows() - 1); }
  TANDEM_DEVICE int heads() const { return C.varlen ? ptx::load_shared(&job->heads) : 1; }
  TANDEM_DEVICE int batch() const { return ptx::load_shared(&job->batch); }
  TANDEM_DEVICE int head() const { return ptx::load_shared(&job->head) + slot; }
  TANDEM_DEVICE int first() const { return ptx::load_shared(&job->first); }
  TANDEM_DEVICE const u16* source(const Strides& s) const {
    return ptx::load_shared(&job->source) + row * s.row + of_head(s.head);
  }
  TANDEM_DEVICE u8* codes(const Strides& s) const {
    return ptx::load_shared(&job->codes) + row * s.row + of_head(s.head);
  }
  TANDEM_DEVICE float* scales(const ScaleStrides& s) const {
    return ptx::load_shared(&job->scales) + of_head(s.head);
  }
  TANDEM_DEVICE float* shift(const ScaleStrides& s) const {
    return ptx::load_shared(&job->shift) + row * s.group + of_head(s.head);
  }

 private:
  TANDEM_DEVICE i64 of_head(i64 stride) const { return C.varlen ? slot * stride : 0; }
};

/// The scale of the row's group. Stored by one thread of those that share it.
template <QuantizeConfig C, Codes codes, ScaleGroup group, Which which>
TANDEM_DEVICE float find_scale(const QuantizeParams& p, const QuantizedTensor& x, const Tables& tables,
                               Magnitude m, int turn) {
  const Place<C> at = own_place<C, which>(tables, turn);
  const int thread = static_cast<int>(ptx::thread_index_anew());
  const int lane = static_cast<int>(ptx::lane_index_anew());
  bool stores = at.of_slot(thread / row_threads) == 0 && thread % row_threads == 0;
  if constexpr (exceeds_block(group)) {
    const bool one = group == ScaleGroup::tensor;
    const int head = one ? 0 : at.batch() * p.heads_kv + at.head();
    const GroupLargest& found = p.largest[head];
    m = {ptx::float_of(ptx::load_global(&found.bits)), ptx::load_global(&found.bad) != 0};
    stores = stores && at.first() == 0 && (!one || at.batch() + at.head() == 0);
  } else if constexpr (group == ScaleGroup::row) {
    m = of_row(m, lane);
    stores = lane % row_threads == 0 && (x.padded_rows || at.used);
  } else {
    m = of_block<codes>(m, tables, thread / warp_size, lane, at.slot_rows() / 8, turn);
  }
  const bool marks = codes == Codes::s8 && group == ScaleGroup::block && x.marks_rows && m.bad;
  if (marks) m.bad = false;
  const Scale s = scale_for<codes>(m);
  if (stores && at.slot < at.heads()) {
    float* const scale = at.scales(x.scale_stride);
    if constexpr (group == ScaleGroup::row) {
      ptx::store_global(scale + at.row * x.scale_stride.group, s.stored);
      if (C.varlen && x.padded_rows) {
        for (int row = at.row + at.slot_rows(); row < quant_block; row += at.slot_rows()) {
          ptx::store_global(scale + row * x.scale_stride.group, 0.0F);
        }
      }
    } else {
      ptx::store_global(scale, marks ? -s.stored : s.stored);
    }
  }
  return s.inverse;
}

/// Whether K's mean is removed, or was, of the job's sequence.
TANDEM_DEVICE bool has_mean(const Job* job) {
  return ptx::warp_uniform(static_cast<int>(ptx::load_shared(&job->mean) != nullptr)) != 0;
}

/// Whether a job has anything to do.
TANDEM_DEVICE bool has_work(const Job* job) {
  return ptx::warp_uniform(ptx::load_shared(&job->rows)) >= 0;
}

/// The thread's own. It is found again where it is needed: what is kept over the arithmetic on a row's values
/// takes registers that they need.
template <Which which>
TANDEM_DEVICE int own_row() {
  const int thread = static_cast<int>(ptx::thread_index_anew());
  return which == Which::v ? key_of_thread(thread) : thread / row_threads;
}
template <QuantizeConfig C, Which which>
TANDEM_DEVICE Place<C> own_place(const Tables& table, int turn) {
  return {table.job(turn), own_row<which>()};
}

/// Starts copying channel `c` of a head's mean.
template <QuantizeConfig C>
TANDEM_DEVICE void fetch_mean(float* to, const float* mean, int c) {
  if (c < C.head_dim_qk) {
    ptx::copy_async(to, mean + c);
  } else {
    ptx::store_shared(to, 0.0F);
  }
}

/// Starts copying a job's rows, and the means that it needs.
template <QuantizeConfig C, Which which>
TANDEM_DEVICE void fetch(const QuantizeParams& p, const Tables& table, int turn) {
  const Job* const job = table.job(turn);
  if (!has_work(job)) return;
  const int thread = static_cast<int>(ptx::thread_index_anew());
  constexpr int head_dim = which == Which::v ? C.head_dim_v : C.head_dim_qk;
  // A row's vectors go to neighbouring threads, whichever will read them.
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    const int row = (j * quantize_threads + thread) / row_vectors<head_dim>;
    const int vector = (j * quantize_threads + thread) % row_vectors<head_dim>;
    const Place<C> from(job, row);
    fetch_vector<C.vectors, head_dim>(place_of_vector<head_dim>(table, row, vector, turn),
                                      from.source(tensor<which>(p).stride), 8 * vector, from.used);
  }
  if constexpr (C.smooth_k && which != Which::v) {
    if (!has_mean(job)) return;
    ptx::wait_for_previous_grid();
    const float* const means = ptx::load_shared(&job->mean);
    if constexpr (C.varlen) {
      for (int i = thread; i < ptx::load_shared(&job->heads) * table.channels; i += quantize_threads) {
        const int head = ptx::load_shared(&job->head) + i / table.channels;
        const int mean_head = which == Which::q ? head / p.group : head;
        fetch_mean<C>(table.mean(turn) + i, means + mean_head * p.mean_stride.head, i % table.channels);
      }
    } else if (thread < table.channels) {
      fetch_mean<C>(table.mean(turn) + thread, means, thread);
    }
  }
}

/// A thread's part of a row of Q or K that `fetch` has brought, ready to be scaled.
template <QuantizeConfig C, Which which>
TANDEM_DEVICE void prepare_row(const QuantizeParams& p, const Tables& table, int turn,
                               Row<C.head_dim_qk>& values) {
  const int t = static_cast<int>(ptx::lane_index_anew()) % row_threads;
  const Place<C> at = own_place<C, which>(table, turn);
  take_row<C.element>(values, table, own_row<which>(), t, turn);
  if constexpr (C.rotary) {
    if (at.used) embed<C>(values, p.rotary, at.source(tensor<which>(p).stride), at.first() + at.row, t);
  }
  const float* const mean = table.mean(turn) + (C.varlen ? min(at.slot, at.heads() - 1) * table.channels : 0);
  if constexpr (C.smooth_k && which == Which::k) {
    if (has_mean(table.job(turn)) && at.used) subtract(values, mean, t);  // the others' values stay 0
  }
  if constexpr (C.smooth_k && which == Which::q) {
    const float shift = has_mean(table.job(turn)) ? dot(values, mean, t) * p.scale : 0.0F;
    if (t == 0 && at.used) ptx::store_global(at.shift(p.shift_stride), shift);
  }
  if constexpr (C.rotate_qk) rotate(values, t);
}

template <QuantizeConfig C, Which which>
TANDEM_DEVICE void quantize_rows(const QuantizeParams& p, const Tables& table, int turn) {
  const QuantizedTensor& x = tensor<which>(p);
  Row<C.head_dim_qk> values;
  prepare_row<C, which>(p, table, turn, values);
  const Magnitude m = magnitude_of(values);
  float inverse = find_scale<C, C.qk, C.qk_scales, which>(p, x, table, m, turn);
  // The sign of the softmax's scale goes with Q: the attention kernel knows positive ones only.
  if (which == Which::q && p.scale < 0.0F) inverse = -inverse;
  bool bad = m.bad;
  if constexpr (C.qk == Codes::s8) {  // by row, which takes a register less than by thread
    bad = row_is_bad(bad, static_cast<int>(ptx::lane_index_anew()));
  }
  const Place<C> at = own_place<C, which>(table, turn);
  if (!at.used) return;
  const int t = static_cast<int>(ptx::thread_index_anew()) % row_threads;
  u8* const codes = at.codes(x.code_stride);
#pragma unroll
  for (int j = 0; j < Row<C.head_dim_qk>::vectors; ++j) {
    Codes8 eight = encode<C.qk>(values.x[j], inverse, bad);
    if (can_mark_rows<C> && j == 0 && bad && x.marks_rows && t == 0) {
      eight.low = (eight.low & ~0xFFU) | marked_row;
    }
    store_codes<C.vectors>(x, codes, (4 * j + t) * 8, eight);
  }
}

/// Word of channel c in the tile of V's codes, 32 words a channel: words that are written together, and those
/// read together, are in different banks.
TANDEM_DEVICE int swizzled_word(int c, int word) {
  return c * 32 + (word ^ 2 * ((c & 3) | (c >> 1 & 12)));
}

/// The 4 x 4 bytes of four threads whose lanes differ in bits 2 and 3: byte n of thread a becomes byte a of
/// thread n.
TANDEM_DEVICE u32 transpose_bytes(u32 word, int lane) {
  word = ptx::permute_bytes(word, ptx::shuffle_xor(word, 4), (lane & 4) != 0 ? 0x3715U : 0x6240U);
  return ptx::permute_bytes(word, ptx::shuffle_xor(word, 8), (lane & 8) != 0 ? 0x3276U : 0x5410U);
}

/// What four of V's codes are stored with.
template <QuantizeConfig C>
constexpr u32 value_offset = raises_v(C.pv, C.v_scales == ScaleGroup::row, C.head_dim_v) ? raised_codes : 0;

/// Codes of channels (4 j + t) * 8 on of the thread's key, into the tile. All lanes of a warp call.
template <QuantizeConfig C>
TANDEM_DEVICE void put_value_codes(const Tables& table, int thread, int j, const Codes8& codes) {
  const int lane = thread % warp_size;
  const int c = (4 * j + lane % row_threads) * 8 + lane / row_threads % 4;
  const int word = thread / warp_size * 2 + lane / 16;
  ptx::store_shared(table.tile + swizzled_word(c, word), transpose_bytes(codes.low ^ value_offset<C>, lane));
  ptx::store_shared(table.tile + swizzled_word(c + 4, word),
                    transpose_bytes(codes.high ^ value_offset<C>, lane));
}

/// The tile of V's codes, once it is whole, to where the attention kernel reads it: `own` chunks of 16 keys
/// from chunk `first` of the tile on, and codes of zeros up to the end of the block.
template <QuantizeConfig C>
TANDEM_DEVICE void store_value_codes(u8* codes, i64 channel_stride, const Tables& table, int thread,
                                     int first = 0, int own = quant_block / 16) {
  constexpr int chunks = quant_block / 16;
  constexpr int all = C.head_dim_v * chunks;
  constexpr u32 zeros = value_offset<C>;
#pragma unroll
  for (int begin = 0; begin < all; begin += quantize_threads) {
    const int i = begin + thread;
    if (begin + quantize_threads > all && i >= all) break;
    const int c = i / chunks;
    const int chunk = i % chunks;
    ptx::Vec4 v{zeros, zeros, zeros, zeros};
    if (chunk < own) {
      const int word = swizzled_word(c, 4 * (first + chunk));
      v = ptx::load_shared(reinterpret_cast<const ptx::Vec4*>(table.tile + (word & ~3)));
      if ((word & 2) != 0) v = {v.z, v.w, v.x, v.y};
    }
    ptx::store_global(reinterpret_cast<ptx::Vec4*>(codes + c * channel_stride + 16 * chunk), v);
  }
}

template <QuantizeConfig C>
TANDEM_DEVICE void quantize_values(const QuantizeParams& p, const Tables& table, int turn) {
  constexpr int head_dim = C.head_dim_v;
  const QuantizedTensor& x = p.v;
  const int thread = static_cast<int>(ptx::thread_index_anew());
  const int t = thread % row_threads;
  Row<head_dim> values;
  take_row<C.element>(values, table, own_row<Which::v>(), t, turn);
  if constexpr (C.rotate_v) rotate(values, t);
  const Magnitude m = magnitude_of(values);
  const float inverse = find_scale<C, C.pv, C.v_scales, Which::v>(p, x, table, m, turn);
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    put_value_codes<C>(table, thread, j, encode<C.pv>(values.x[j], inverse, m.bad));
  }
  ptx::sync_block();
  u8* const codes = ptx::load_shared(&table.job(turn)->codes);
  if constexpr (C.varlen) {
    const Place<C> at = own_place<C, Which::v>(table, turn);
    const int own = at.slot_rows() / 16;
    for (int head = 0; head < at.heads(); ++head) {
      store_value_codes<C>(codes + head * x.code_stride.head, x.code_stride.row, table, thread, head * own,
                           own);
    }
  } else {
    store_value_codes<C>(codes, x.code_stride.row, table, thread);
  }
}

}  // namespace quantizer

/// A block of threads takes every grid_size()-th unit. While it computes a job, the rows of the next one are
/// on their way, and the one after that is being found. The next grid may start where a block ends: announced
/// at the beginning, which is no earlier since blocks fill the device, it made calls at head dimension 256 10
/// us longer.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads, C.blocks_per_sm())
    quantize(const __grid_constant__ QuantizeParams p) {
  using quantizer::Which;
  const quantizer::Tables table = quantizer::tables<C>();
  const int units = p.units_k + p.units_v + p.units_q;
  const auto first_warp = [] { return ptx::thread_index_anew() < warp_size; };
  if (first_warp()) {
    quantizer::prepare_job<C>(p, static_cast<int>(ptx::block_index()), 0, table.job(0));
    quantizer::prepare_job_after<C>(p, table.job(0), table.job(quantizer::Tables::after(0)));
  }
  ptx::sync_block();
  const auto unit_of = [&](int turn) {
    return ptx::warp_uniform(ptx::load_shared(&table.job(turn)->number));
  };
  const auto with_job = [&](int turn, auto f) {
    quantizer::with_unit<C>(p, unit_of(turn), [&](auto tag, int) { f(tag); });
  };
  const auto fetch = [&](int turn) {
    with_job(turn, [&](auto tag) { quantizer::fetch<C, decltype(tag)::which>(p, table, turn); });
  };
  fetch(0);
  for (int turn = 0; unit_of(turn) < units; turn = quantizer::Tables::after(turn)) {
    ptx::wait_for_copies();
    ptx::sync_block();  // the mean is there, and so is the next job; the last one's places are free
    const int next = quantizer::Tables::after(turn);
    fetch(next);
    if (first_warp()) {
      quantizer::prepare_job_after<C>(p, table.job(next), table.job(quantizer::Tables::after(next)));
    }
    if (!quantizer::has_work(table.job(turn))) continue;
    with_job(turn, [&](auto tag) {
      constexpr Which which = decltype(tag)::which;
      if constexpr (which == Which::v) {
        quantizer::quantize_values<C>(p, table, turn);
      } else {
        quantizer::quantize_rows<C, which>(p, table, turn);
      }
    });
  }
}

/// The largest magnitudes of K's groups that are larger than a block.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads, C.blocks_per_sm())
    largest_of_groups(const __grid_constant__ QuantizeParams p) {
  const quantizer::Tables table = quantizer::tables<C>();
  if (ptx::thread_index() < warp_size) {
    quantizer::prepare_job<C>(p, static_cast<int>(ptx::block_index()), 0, table.job(0));
  }
  ptx::sync_block();
  if (!quantizer::has_work(table.job(0))) return;
  quantizer::fetch<C, quantizer::Which::k>(p, table, 0);
  ptx::wait_for_copies();
  ptx::sync_block();
  quantizer::Row<C.head_dim_qk> values;
  quantizer::prepare_row<C, quantizer::Which::k>(p, table, 0, values);
  const quantizer::Place<C> at = quantizer::own_place<C, quantizer::Which::k>(table, 0);
  const int thread = static_cast<int>(ptx::thread_index_anew());
  const quantizer::Magnitude m =
      quantizer::of_block<Codes::s8>(quantizer::magnitude_of(values), table, thread / warp_size,
                                     thread % warp_size, quantize_threads / warp_size, 0);
  if (thread != 0) return;
  GroupLargest* const group =
      p.largest + (C.qk_scales == ScaleGroup::tensor ? 0 : at.batch() * p.heads_kv + at.head());
  ptx::atomic_max(&group->bits, ptx::bits_of(m.largest));
  if (m.bad) ptx::atomic_max(&group->bad, 1U);
}

}  // namespace tandem
