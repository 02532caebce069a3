// 16-bit Q, K and V to 8-bit values and scales, all three in one launch. Bound by memory: every element is
// read once and its code written once. Before it, where K's mean is removed, one launch over K alone, or a
// sample of it, sums its channels.
//
// A work item is 128 rows of a head, a block of scales. Q and K are written as rows. V is written with keys
// contiguous: the four threads whose keys share a word exchange 4 x 4 bytes, and shared memory exchanges
// words.
#pragma once

#include "ops/quantize/common/quantize_fetch.cuh"
#include "ops/quantize/common/quantize_rotation.cuh"

namespace tandem {

namespace quantizer {

/// Whether rows of Q and K that hold a NaN get a marker.
template <QuantizeConfig C>
constexpr bool has_nan_markers = C.qk == OperandType::s8&& C.qk_scales == ScaleGroup::block;

/// Stores eight values of a row.
template <bool vectors>
TANDEM_DEVICE void store_quantized(const QuantizedTensor& x, u8* row, int col, const Quantized8& quantized) {
  if constexpr (vectors) {
    if (col < x.quantized_columns) {
      ptx::store_global(reinterpret_cast<u64*>(row + col),
                        static_cast<u64>(quantized.high) << 32 | quantized.low);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (col + i < x.quantized_columns) {
        ptx::store_global(row + col + i,
                          static_cast<u8>((i < 4 ? quantized.low : quantized.high) >> (8 * (i % 4))));
      }
    }
  }
}

/// Returns the inverse of the scale of the row's group. One of the threads that share it stores the scale.
template <QuantizeConfig C, OperandType type, ScaleGroup group, Which which>
TANDEM_DEVICE float find_scale(const QuantizeParams& p, const QuantizedTensor& x, const Tables& tables,
                               Magnitude m, int pass_at) {
  const ThreadRow<C> at = thread_row<C, which>(tables, pass_at);
  const int thread = static_cast<int>(ptx::thread_index_anew());
  const int lane = static_cast<int>(ptx::lane_index_anew());
  constexpr int threads = C.row_threads();
  bool stores = at.in_segment(thread / threads) == 0 && thread % threads == 0;
  if constexpr (exceeds_block(group)) {
    const bool one = group == ScaleGroup::tensor;
    const int head = one ? 0 : at.batch() * p.heads_kv + at.head();
    const GroupLargest& found = p.largest[head];
    m = {ptx::float_of(ptx::load_global(&found.bits)), ptx::load_global(&found.bad) != 0};
    stores = stores && at.first() == 0 && (!one || at.batch() + at.head() == 0);
  } else if constexpr (group == ScaleGroup::row) {
    m = of_row<threads>(m, lane);
    stores = lane % threads == 0 && (x.padded_rows || at.used);
  } else {
    constexpr int rows_of_warp = warp_size / threads;
    m = of_block<type>(m, tables, thread / warp_size, lane, at.segment_rows() / rows_of_warp, pass_at);
  }
  const bool has_nan = type == OperandType::s8 && group == ScaleGroup::block && x.nan_markers && m.bad;
  if (has_nan) m.bad = false;
  const Scale s = scale_for<type>(m);
  if (stores && at.segment < at.heads()) {
    float* const scale = at.scales(x.scale_stride);
    if constexpr (group == ScaleGroup::row) {
      ptx::store_global(scale + at.row * x.scale_stride.group, s.stored);
      if (C.varlen && x.padded_rows) {
        for (int row = at.row + at.segment_rows(); row < quant_block; row += at.segment_rows()) {
          ptx::store_global(scale + row * x.scale_stride.group, 0.0F);
        }
      }
    } else {
      ptx::store_global(scale, has_nan ? -s.stored : s.stored);
    }
  }
  return s.inverse;
}

/// A thread's part of a row of Q or K that `fetch` has copied, ready to be scaled.
template <QuantizeConfig C, Which which>
TANDEM_DEVICE void prepare_row(const QuantizeParams& p, const Tables& table, int pass_at,
                               Row<C.head_dim_qk, C.row_threads()>& values) {
  const int t = static_cast<int>(ptx::lane_index_anew()) % C.row_threads();
  const ThreadRow<C> at = thread_row<C, which>(table, pass_at);
  load_row<C.element>(values, table, row_of_thread<C, which>(), t, pass_at);
  const float* const mean =
      table.mean(pass_at) + (C.varlen ? min(at.segment, at.heads() - 1) * table.channels : 0);
  if constexpr (C.smooth_k && which == Which::k) {
    if (has_mean(table.pass(pass_at)) && at.used) subtract(values, mean, t);  // the others' values stay 0
  }
  if constexpr (C.smooth_k && which == Which::q) {
    const float shift = has_mean(table.pass(pass_at)) ? dot(values, mean, t) * p.scale : 0.0F;
    if (t == 0 && at.used) ptx::store_global(at.shift(p.shift_stride), shift);
  }
  if constexpr (C.rotate_qk) rotate(values, t);
}

template <QuantizeConfig C, Which which>
TANDEM_DEVICE void quantize_rows(const QuantizeParams& p, const Tables& table, int pass_at) {
  const QuantizedTensor& x = tensor<which>(p);
  using Values = Row<C.head_dim_qk, C.row_threads()>;
  Values values;
  prepare_row<C, which>(p, table, pass_at, values);
  const Magnitude m = magnitude_of(values);
  float inverse = find_scale<C, C.qk, C.qk_scales, which>(p, x, table, m, pass_at);
  // A negative softmax scale negates Q: the attention kernel takes only positive scales.
  if (which == Which::q && p.scale < 0.0F) inverse = -inverse;
  bool bad = m.bad;
  // Whether the whole row is bad takes a register less than whether the thread's part of it is.
  if constexpr (C.qk == OperandType::s8) {
    bad = row_is_bad<C.row_threads()>(bad, static_cast<int>(ptx::lane_index_anew()));
  }
  const ThreadRow<C> at = thread_row<C, which>(table, pass_at);
  if (!at.used) return;
  const int t = static_cast<int>(ptx::thread_index_anew()) % C.row_threads();
  u8* const quantized = at.quantized(x.quantized_stride);
  const auto eight_at = [&](int j) {
    Quantized8 eight = encode<C.qk>(values.x[j], inverse, bad);
    if (has_nan_markers<C> && j == 0 && bad && x.nan_markers && t == 0) {
      eight.low = (eight.low & ~0xFFU) | nan_marker;
    }
    return eight;
  };
  if constexpr (C.stores_sixteen()) {
    auto* const to = reinterpret_cast<ptx::Vec4*>(quantized + Values::channel(0, t));
#pragma unroll
    for (int j = 0; j < Values::vectors; j += 2) {
      const Quantized8 first = eight_at(j), second = eight_at(j + 1);
      ptx::store_global(to + j, ptx::Vec4{first.low, first.high, second.low, second.high});
    }
  } else {
#pragma unroll
    for (int j = 0; j < Values::vectors; ++j) {
      store_quantized<C.vectors>(x, quantized, Values::channel(j, t), eight_at(j));
    }
  }
}

/// The index of a word of channel c in the tile of V, which has 32 words a channel. Words that are written at
/// the same time, by threads that are `threads` a row, are in different banks, and so are words that are read
/// at the same time.
template <int threads>
TANDEM_DEVICE int swizzled_word(int c, int word) {
  const int by_channel = threads == 4 ? 2 * ((c & 3) | (c >> 1 & 12)) : 4 * ((c & 3) | (c >> 2 & 4));
  return c * 32 + (word ^ by_channel);
}

/// The 4 x 4 bytes of four threads whose lanes differ in the bits of `distance` and twice that: byte n of
/// thread a becomes byte a of thread n.
template <int distance>
TANDEM_DEVICE u32 transpose_bytes(u32 word, int lane) {
  const u32 other = ptx::shuffle_xor(word, distance);
  word = ptx::permute_bytes(word, other, (lane & distance) != 0 ? 0x3715U : 0x6240U);
  const u32 across = ptx::shuffle_xor(word, 2 * distance);
  return ptx::permute_bytes(word, across, (lane & 2 * distance) != 0 ? 0x3276U : 0x5410U);
}

/// What four of V's values are combined with (exclusive or) to add the zero point 128.
template <QuantizeConfig C>
constexpr u32 zero_points = takes_zero_point(C.pv, C.v_scales == ScaleGroup::row, C.head_dim_v)
                                ? four_zero_points
                                : 0;

/// Puts vector j of the thread's row, which `threads` share, into the tile. All lanes of a warp call.
template <QuantizeConfig C, int threads>
TANDEM_DEVICE void put_quantized_v(const Tables& table, int thread, int j, const Quantized8& quantized) {
  using Values = Row<C.head_dim_v, threads>;
  const int first = Values::channel(0, thread % threads) + thread / threads % 4;
  // The swizzle takes no bit of a channel that depends on the vector.
  u32* const to = table.tile + swizzled_word<threads>(first, thread / (4 * threads));
  ptx::store_shared(to + Values::channel(j, 0) * 32,
                    transpose_bytes<threads>(quantized.low ^ zero_points<C>, thread));
  ptx::store_shared(to + (Values::channel(j, 0) + 4) * 32,
                    transpose_bytes<threads>(quantized.high ^ zero_points<C>, thread));
}

/// Writes the complete tile, channel by channel: `own` chunks of 16 rows from chunk `first` of the tile on,
/// and then `zeros` up to chunk `end`.
template <int head_dim, int threads, u32 zeros>
TANDEM_DEVICE void store_transposed(u8* quantized, i64 channel_stride, const Tables& table, int thread,
                                    int first = 0, int own = quant_block / 16, int end = quant_block / 16) {
  constexpr int chunks = quant_block / 16;
  constexpr int all = head_dim * chunks;
#pragma unroll
  for (int begin = 0; begin < all; begin += threads * quant_block) {
    const int i = begin + thread;
    if (begin + threads * quant_block > all && i >= all) break;
    const int c = i / chunks;
    const int chunk = i % chunks;
    if (chunk >= end) break;
    ptx::Vec4 v{zeros, zeros, zeros, zeros};
    if (chunk < own) {
      const int word = swizzled_word<threads>(c, 4 * (first + chunk));
      v = ptx::load_shared(reinterpret_cast<const ptx::Vec4*>(table.tile + (word & ~3)));
      if ((word & 2) != 0) v = {v.z, v.w, v.x, v.y};
    }
    ptx::store_global(reinterpret_cast<ptx::Vec4*>(quantized + c * channel_stride + 16 * chunk), v);
  }
}
template <QuantizeConfig C>
TANDEM_DEVICE void quantize_values(const QuantizeParams& p, const Tables& table, int pass_at) {
  constexpr int head_dim = C.head_dim_v;
  const QuantizedTensor& x = p.v;
  const int thread = static_cast<int>(ptx::thread_index_anew());
  constexpr int threads = C.row_threads();
  const int t = thread % threads;
  Row<head_dim, threads> values;
  load_row<C.element>(values, table, row_of_thread<C, Which::v>(), t, pass_at);
  if constexpr (C.rotate_v) rotate(values, t);
  const Magnitude m = magnitude_of(values);
  const float inverse = find_scale<C, C.pv, C.v_scales, Which::v>(p, x, table, m, pass_at);
#pragma unroll
  for (int j = 0; j < values.vectors; ++j) {
    put_quantized_v<C, threads>(table, thread, j, encode<C.pv>(values.x[j], inverse, m.bad));
  }
  ptx::sync_block();
  u8* const quantized = ptx::load_shared(&table.pass(pass_at)->quantized);
  if constexpr (C.varlen) {
    const ThreadRow<C> at = thread_row<C, Which::v>(table, pass_at);
    const int own = at.segment_rows() / 16;
    for (int head = 0; head < at.heads(); ++head) {
      store_transposed<head_dim, threads, zero_points<C>>(
          quantized + head * x.quantized_stride.head, x.quantized_stride.row, table, thread, head * own, own);
    }
  } else {
    store_transposed<head_dim, threads, zero_points<C>>(quantized, x.quantized_stride.row, table, thread);
  }
}

}  // namespace quantizer

namespace quantizer {

/// Finds the first passes. One warp calls.
template <QuantizeConfig C>
TANDEM_DEVICE void find_first_passes(const QuantizeParams& p, const Tables& table) {
  const int number = static_cast<int>(ptx::block_index());
  if constexpr (C.varlen) {
    prepare_pass<C>(p, number, 0, table.pass(0));
    prepare_next_pass<C>(p, table.pass(0), table.pass(Tables::after(0)));
  } else {
    prepare_passes<C>(p, number, table.passes);
  }
}

/// Finds the pass after the next, at every pass or at one of passes_at_once for as many. One warp calls.
template <QuantizeConfig C>
TANDEM_DEVICE void find_later_passes(const QuantizeParams& p, const Tables& table, int pass_at) {
  if constexpr (C.varlen) {
    const int next = Tables::after(pass_at);
    prepare_next_pass<C>(p, table.pass(next), table.pass(Tables::after(next)));
  } else {
    constexpr int together = passes_at_once * quantize_pass_bytes;
    static_assert(2 * passes_at_once == quantize_passes);
    if (pass_at % together != 0) return;
    const int number = ptx::load_shared(&table.pass(pass_at)->number);
    prepare_passes<C>(p, number + passes_at_once * static_cast<int>(ptx::grid_size()),
                      table.passes + (pass_at ^ together));
  }
}

}  // namespace quantizer

/// Each CTA takes every grid_size()-th work item. While it computes a pass, the rows of the next pass are
/// being copied, and later passes are being found. The next grid may start where CTAs end. (Announcing it at
/// the beginning starts it no earlier, since the CTAs fill the device, and made calls at head dimension 256
/// 10 us longer.)
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), C.blocks_per_sm())
    quantize(const __grid_constant__ QuantizeParams p) {
  using quantizer::Which;
  const quantizer::Tables table = quantizer::tables<C>();
  const int items = p.items_k + p.items_v + p.items_q;
  const auto first_warp = [] { return ptx::thread_index_anew() < warp_size; };
  if (first_warp()) quantizer::find_first_passes<C>(p, table);
  ptx::sync_block();
  const auto item_of = [&](int pass_at) {
    return ptx::warp_uniform(ptx::load_shared(&table.pass(pass_at)->number));
  };
  const auto with_pass = [&](int pass_at, auto f) {
    quantizer::with_item<C>(p, item_of(pass_at), [&](auto tag, int) { f(tag); });
  };
  const auto fetch = [&](int pass_at) {
    with_pass(pass_at, [&](auto tag) { quantizer::fetch<C, decltype(tag)::which>(p, table, pass_at); });
  };
  fetch(0);
  for (int pass_at = 0; item_of(pass_at) < items; pass_at = quantizer::Tables::after(pass_at)) {
    ptx::wait_for_copies();
    ptx::sync_block();  // the mean is there, and so is the next pass; the last one's buffers are free
    fetch(quantizer::Tables::after(pass_at));
    if (first_warp()) quantizer::find_later_passes<C>(p, table, pass_at);
    if (!quantizer::has_work(table.pass(pass_at))) continue;
    with_pass(pass_at, [&](auto tag) {
      constexpr Which which = decltype(tag)::which;
      if constexpr (which == Which::v) {
        quantizer::quantize_values<C>(p, table, pass_at);
      } else {
        quantizer::quantize_rows<C, which>(p, table, pass_at);
      }
    });
  }
  if constexpr (C.smooth_k) ptx::outlast_previous_grid();
}

/// The largest magnitudes of K's groups that are larger than a block.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(C.threads(), C.blocks_per_sm())
    largest_of_groups(const __grid_constant__ QuantizeParams p) {
  const quantizer::Tables table = quantizer::tables<C>();
  if (ptx::thread_index() < warp_size) {
    quantizer::prepare_pass<C>(p, static_cast<int>(ptx::block_index()), 0, table.pass(0));
  }
  ptx::sync_block();
  if (!quantizer::has_work(table.pass(0))) return;
  quantizer::fetch<C, quantizer::Which::k>(p, table, 0);
  ptx::wait_for_copies();
  ptx::sync_block();
  quantizer::Row<C.head_dim_qk, C.row_threads()> values;
  quantizer::prepare_row<C, quantizer::Which::k>(p, table, 0, values);
  const quantizer::ThreadRow<C> at = quantizer::thread_row<C, quantizer::Which::k>(table, 0);
  const int thread = static_cast<int>(ptx::thread_index_anew());
  const quantizer::Magnitude m =
      quantizer::of_block<OperandType::s8>(quantizer::magnitude_of(values), table, thread / warp_size,
                                           thread % warp_size, C.threads() / warp_size, 0);
  if (thread != 0) return;
  GroupLargest* const group =
      p.largest + (C.qk_scales == ScaleGroup::tensor ? 0 : at.batch() * p.heads_kv + at.head());
  ptx::atomic_max(&group->bits, ptx::bits_of(m.largest));
  if (m.bad) ptx::atomic_max(&group->bad, 1U);
}

}  // namespace tandem
