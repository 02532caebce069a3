// 16-bit Q, K and V to 8-bit codes and scales, all three in one launch. Bound by memory: every element is
// read once and its code written once. Before it, where K's mean is removed, one launch over K alone, or a
// sample of it, sums its channels.
//
// A block of threads takes one unit: 128 rows of a head, as blocks of scales count them. Q and K leave as
// rows; V leaves with keys contiguous, its 4 x 4 bytes exchanged between the four threads whose keys share a
// word, the words through shared memory.
#pragma once

#include "kernels/quantize_rows.cuh"
#include "kernels/tile/scheduler.cuh"

namespace tandem {

namespace quantizer {

/// 128 rows of a head of one sequence.
struct Unit {
  int batch;  ///< the sequence
  int entry;  ///< in tensors: the batch index, 0 if packed
  int head;
  int first;   ///< row of the sequence
  int begin;   ///< first row of the sequence in the tensor
  int used;    ///< rows in use
  int block;   ///< on the axis of quantized_layout.hpp
  int blocks;  ///< of the rows in use
};

struct Side {
  tile::RaggedSide rows;
  int blocks;  ///< of 128 rows (equal lengths)
};
TANDEM_DEVICE Side query_side(const QuantizeParams& p) {
  return {{p.cu_seqlens_q, p.seqused_q, p.rows_q, p.batch, p.heads_q, p.packed_q}, p.blocks_q};
}
TANDEM_DEVICE Side key_side(const QuantizeParams& p) {
  return {{p.cu_seqlens_k, p.seqused_k, p.rows_k, p.batch, p.heads_kv, p.packed_k}, p.blocks_k};
}

/// The last of packed sequences whose first block is not past `block`: each warp tries 32 at a time.
TANDEM_DEVICE int sequence_of_block(const tile::RaggedSide& side, int block) {
  const int lane = static_cast<int>(ptx::thread_index_anew()) % warp_size;
  int first = 0;  // the answer is in [first, first + count)
  for (int count = side.batch; count > 1;) {
    const int step = ceil_div(count, warp_size);
    const int b = first + lane * step;
    bool after = lane * step >= count;
    if (!after)
      after =
          first_block(tile::sequence_rows(side.cu, {nullptr, 0, false}, side.rows, b).begin, b, true) > block;
    const u32 past = ptx::ballot(after);
    const int steps = past == 0 ? warp_size : ptx::find_first_set(past);
    first += max(steps - 1, 0) * step;
    count = min(step, side.batch - first);
  }
  return first;
}

/// False where the unit has no row in use. Heads of a block are neighbours in the tensor and in number. All
/// lanes of a warp call.
template <QuantizeConfig C>
TANDEM_DEVICE bool locate(const Side& side, int number, Unit& u) {
  const int block = number / side.rows.heads;
  u.head = number - block * side.rows.heads;
  u.begin = 0;
  u.used = side.rows.rows;
  if (C.ragged && side.rows.packed) {
    u.batch = sequence_of_block(side.rows, block);
  } else {
    u.batch = block / side.blocks;
  }
  if constexpr (C.ragged) {
    const tile::SequenceRows rows =
        tile::sequence_rows(side.rows.cu, side.rows.used, side.rows.rows, u.batch);
    u.begin = rows.begin;
    u.used = rows.used;
  }
  const bool packed = C.ragged && side.rows.packed;
  u.entry = packed ? 0 : u.batch;
  u.block = packed ? block : block - u.batch * side.blocks;
  u.first = (u.block - first_block(u.begin, u.batch, packed)) * quant_block;
  u.blocks = ceil_div(u.used, quant_block);
  return u.first >= 0 && u.first < u.used;
}

TANDEM_DEVICE i64 offset_of(const Strides& s, const Unit& u, i64 row) {
  return u.entry * s.batch + row * s.row + u.head * s.head;
}
TANDEM_DEVICE i64 offset_of(const ScaleStrides& s, const Unit& u, i64 group) {
  return u.entry * s.batch + u.head * s.head + group * s.group;
}

/// Signs of the channels.
template <QuantizeConfig C>
TANDEM_DEVICE void fill_signs(const Tables& tables) {
  const int c = static_cast<int>(ptx::thread_index_anew());
  if (c >= tables.channels) return;
  if constexpr (C.rotate_qk) {
    ptx::store_shared(tables.sign + c, c < C.head_dim_qk ? rotation_sign(c) : 1.0F);
  }
  if constexpr (C.rotate_v) {
    ptx::store_shared(tables.v_sign + c, c < C.head_dim_v ? rotation_sign(c) : 1.0F);
  }
}

/// Whether rows of Q and K can be marked.
template <QuantizeConfig C>
constexpr bool can_mark_rows = C.qk == Codes::s8&& C.qk_scales == ScaleGroup::block;

/// The scale of the row's group. Stored by one thread of those that share it.
template <QuantizeConfig C, Codes codes, ScaleGroup group>
TANDEM_DEVICE float find_scale(const QuantizeParams& p, const QuantizedTensor& x, const Tables& tables,
                               const Unit& u, int row, Magnitude m, int turn) {
  const int thread = static_cast<int>(ptx::thread_index_anew());
  const int lane = thread % warp_size;
  bool stores = thread == 0;
  i64 at = u.block;
  if constexpr (exceeds_block(group)) {
    const bool one = group == ScaleGroup::tensor;
    const GroupLargest& found = p.largest[one ? 0 : u.batch * p.heads_kv + u.head];
    m = {ptx::float_of(ptx::load_global(&found.bits)), ptx::load_global(&found.bad) != 0};
    stores = stores && u.first == 0 && (!one || u.batch + u.head == 0);
    at = 0;
  } else if constexpr (group == ScaleGroup::row) {
    m = of_row(m, lane);
    stores = lane % row_threads == 0 && (x.padded_rows || u.first + row < u.used);
    at = static_cast<i64>(u.block) * quant_block + row;
  } else {
    m = of_block<codes>(m, tables, thread / warp_size, lane, turn);
  }
  const bool marks = codes == Codes::s8 && group == ScaleGroup::block && x.marks_rows && m.bad;
  if (marks) m.bad = false;
  const Scale s = scale_for<codes>(m);
  if (stores) {
    ptx::store_global(x.scales + offset_of(x.scale_stride, u, at), marks ? -s.stored : s.stored);
  }
  return s.inverse;
}

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

enum class Which : int { q, k, v };

template <Which which>
TANDEM_DEVICE const QuantizedTensor& tensor(const QuantizeParams& p) {
  return which == Which::q ? p.q : which == Which::k ? p.k : p.v;
}

/// The key of a unit whose row of V the thread has: a warp has two words of four keys, and its lanes take
/// them in the order in which they are stored.
TANDEM_DEVICE int key_of_thread(int thread) {
  return thread / warp_size / 2 * 16 +
         v_key_of(thread / warp_size % 2 * 8 + thread % warp_size / row_threads);
}

/// A tensor as a type.
template <Which w>
struct Tag {
  static constexpr Which which = w;
};

/// A thread's row of a unit.
template <QuantizeConfig C, Which which>
struct Place {
  Unit u;
  int row;
  bool used;

  /// False where there is nothing to do: groups without rows have a scale, where they are larger than blocks.
  TANDEM_DEVICE bool find(const QuantizeParams& p, int number) {
    const bool some = locate<C>(which == Which::q ? query_side(p) : key_side(p), number, u);
    const int thread = static_cast<int>(ptx::thread_index_anew());
    row = which == Which::v ? key_of_thread(thread) : thread / row_threads;
    used = u.first + row < u.used;
    return some || (which != Which::v && exceeds_block(C.qk_scales) && u.first == 0);
  }
  TANDEM_DEVICE i64 tensor_row() const { return u.begin + static_cast<i64>(u.first + row); }
  TANDEM_DEVICE const u16* source(const QuantizeParams& p) const {
    const QuantizedTensor& x = tensor<which>(p);
    return static_cast<const u16*>(x.source) + offset_of(x.stride, u, tensor_row());
  }
  /// Whether K has a mean: a sequence without keys has none.
  TANDEM_DEVICE bool has_mean(const QuantizeParams& p) const {
    if constexpr (!C.smooth_k || which == Which::v) return false;
    if (which == Which::k) return u.used > 0;
    return (C.ragged ? tile::other_side(key_side(p).rows, u.batch).used : p.rows_k) > 0;
  }
};

/// Starts copying a unit's rows, and the mean that it needs.
template <QuantizeConfig C, Which which>
TANDEM_DEVICE void fetch(const QuantizeParams& p, const Tables& table, int number, int turn) {
  Place<C, which> at;
  if (!at.find(p, number)) return;
  const int thread = static_cast<int>(ptx::thread_index_anew());
  fetch_row<C.vectors, which == Which::v ? C.head_dim_v : C.head_dim_qk>(table, at.source(p), at.used, thread,
                                                                         turn);
  if (!at.has_mean(p)) return;
  ptx::wait_for_previous_grid();
  const int head = which == Which::q ? at.u.head / (p.heads_q / p.heads_kv) : at.u.head;
  const float* const mean = p.mean + at.u.batch * p.mean_stride.batch + head * p.mean_stride.head;
  float* const to = table.mean + turn * table.channels + thread;
  if (thread < C.head_dim_qk) {
    ptx::copy_async(to, mean + thread);
  } else if (thread < table.channels) {
    ptx::store_shared(to, 0.0F);
  }
}

/// A thread's part of a row of Q or K, ready to be scaled.
template <QuantizeConfig C, Which which>
struct PreparedRow {
  Row<C.head_dim_qk> values;
  Place<C, which> at;
  int t;

  /// What `fetch` has brought. False where there is nothing to do.
  TANDEM_DEVICE bool take(const QuantizeParams& p, const Tables& table, int number, int turn) {
    const int thread = static_cast<int>(ptx::thread_index_anew());
    if (!at.find(p, number)) return false;
    take_row<C.element>(values, table, thread, turn);
    t = thread % row_threads;
    if constexpr (C.rotary) {
      if (at.used) embed<C>(values, p.rotary, at.source(p), at.u.first + at.row, t);
    }
    const float* const mean = table.mean + turn * table.channels;
    if constexpr (C.smooth_k && which == Which::k) {
      if (at.has_mean(p) && at.used) subtract(values, mean, t);  // the others' values stay 0
    }
    if constexpr (C.smooth_k && which == Which::q) {
      const float shift = at.has_mean(p) ? dot(values, mean, t) * p.scale : 0.0F;
      if (t == 0 && at.used) {
        const i64 group = static_cast<i64>(at.u.block) * quant_block + at.row;
        ptx::store_global(p.shift + offset_of(p.shift_stride, at.u, group), shift);
      }
    }
    if constexpr (C.rotate_qk) rotate(values, table.sign, t);
    return true;
  }
};

template <QuantizeConfig C, Which which>
TANDEM_DEVICE void quantize_rows(const QuantizeParams& p, const Tables& table, int number, int turn) {
  const QuantizedTensor& x = tensor<which>(p);
  PreparedRow<C, which> r;
  if (!r.take(p, table, number, turn)) return;
  const Magnitude m = magnitude_of(r.values);
  float inverse = find_scale<C, C.qk, C.qk_scales>(p, x, table, r.at.u, r.at.row, m, turn);
  // The sign of the softmax's scale goes with Q: the attention kernel knows positive ones only.
  if (which == Which::q && p.scale < 0.0F) inverse = -inverse;
  bool bad = m.bad;
  if constexpr (C.qk == Codes::s8) {  // by row, which takes a register less than by thread
    bad = row_is_bad(bad, static_cast<int>(ptx::thread_index_anew()) % warp_size);
  }
  if (!r.at.used) return;
  u8* const codes = x.codes + offset_of(x.code_stride, r.at.u, r.at.tensor_row());
#pragma unroll
  for (int j = 0; j < Row<C.head_dim_qk>::vectors; ++j) {
    Codes8 eight = encode<C.qk>(r.values.x[j], inverse, bad);
    if (can_mark_rows<C> && j == 0 && bad && x.marks_rows && r.t == 0) {
      eight.low = (eight.low & ~0xFFU) | marked_row;
    }
    store_codes<C.vectors>(x, codes, (4 * j + r.t) * 8, eight);
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

/// Codes of channels (4 j + t) * 8 on of the thread's key, into the tile. All lanes of a warp call.
TANDEM_DEVICE void put_value_codes(const Tables& table, int thread, int j, const Codes8& codes) {
  const int lane = thread % warp_size;
  const int c = (4 * j + lane % row_threads) * 8 + lane / row_threads % 4;
  const int word = thread / warp_size * 2 + lane / 16;
  ptx::store_shared(table.tile + swizzled_word(c, word), transpose_bytes(codes.low, lane));
  ptx::store_shared(table.tile + swizzled_word(c + 4, word), transpose_bytes(codes.high, lane));
}

/// The tile of V's codes, once it is whole, to where the attention kernel reads it.
template <int head_dim>
TANDEM_DEVICE void store_value_codes(const QuantizedTensor& x, const Tables& table, const Unit& u,
                                     int thread) {
  constexpr int chunks = quant_block / 16;
  u8* const codes = x.codes + offset_of(x.code_stride, u, 0) + static_cast<i64>(u.block) * quant_block;
#pragma unroll
  for (int i = thread; i < head_dim * chunks; i += quantize_threads) {
    const int c = i / chunks;
    const int chunk = i % chunks;
    const int word = swizzled_word(c, 4 * chunk);
    const ptx::Vec4 v = ptx::load_shared(reinterpret_cast<const ptx::Vec4*>(table.tile + (word & ~3)));
    const bool swapped = (word & 2) != 0;
    ptx::store_global(reinterpret_cast<ptx::Vec4*>(codes + c * x.code_stride.row + 16 * chunk),
                      swapped ? ptx::Vec4{v.z, v.w, v.x, v.y} : v);
  }
}

template <QuantizeConfig C>
TANDEM_DEVICE void quantize_values(const QuantizeParams& p, const Tables& table, int number, int turn) {
  constexpr int head_dim = C.head_dim_v;
  const QuantizedTensor& x = p.v;
  const int thread = static_cast<int>(ptx::thread_index_anew());
  const int t = thread % row_threads;
  Place<C, Which::v> at;
  if (!at.find(p, number)) return;
  Row<head_dim> values;
  take_row<C.element>(values, table, thread, turn);
  if constexpr (C.rotate_v) rotate(values, table.v_sign, t);
  const Magnitude m = magnitude_of(values);
  const float inverse = find_scale<C, C.pv, C.v_scales>(p, x, table, at.u, at.row, m, turn);
  // The last unit's codes are read no more: so much is known where threads have met since.
  if constexpr (C.v_scales == ScaleGroup::row && !C.smooth_k) ptx::sync_block();
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    put_value_codes(table, thread, j, encode<C.pv>(values.x[j], inverse, m.bad));
  }
  ptx::sync_block();
  store_value_codes<head_dim>(x, table, at.u, thread);
}

/// The units of a launch: of K, then of V and of Q. Calls f with the tensor and the number of the unit among
/// its own.
template <QuantizeConfig C, typename F>
TANDEM_DEVICE void with_unit(const QuantizeParams& p, int unit, F f) {
  if (unit < p.units_k) return f(Tag<Which::k>{}, unit);
  unit -= p.units_k;
  if constexpr (C.pv != Codes::input) {
    if (unit < p.units_v) return f(Tag<Which::v>{}, unit);
    unit -= p.units_v;
  }
  if (unit < p.units_q) f(Tag<Which::q>{}, unit);
}

}  // namespace quantizer

/// A block of threads takes every grid_size()-th unit, and has the next one on its way while it computes one.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads, C.blocks_per_sm())
    quantize(const __grid_constant__ QuantizeParams p) {
  using quantizer::Which;
  ptx::launch_next_grid();
  const quantizer::Tables table = quantizer::tables<C>();
  quantizer::fill_signs<C>(table);
  const int units = p.units_k + p.units_v + p.units_q;
  int unit = static_cast<int>(ptx::block_index());
  const auto fetch = [&](int next, int turn) {
    quantizer::with_unit<C>(p, next, [&](auto tag, int number) {
      quantizer::fetch<C, decltype(tag)::which>(p, table, number, turn);
    });
  };
  fetch(unit, 0);
  ptx::sync_block();
  for (int turn = 0; unit < units; turn ^= 1) {
    const int next = unit + static_cast<int>(ptx::grid_size());
    ptx::wait_for_copies();
    if constexpr (C.smooth_k) ptx::sync_block();  // the mean is there; the last unit's is read no more
    fetch(next, turn ^ 1);
    quantizer::with_unit<C>(p, unit, [&](auto tag, int number) {
      constexpr Which which = decltype(tag)::which;
      if constexpr (which == Which::v) {
        quantizer::quantize_values<C>(p, table, number, turn);
      } else {
        quantizer::quantize_rows<C, which>(p, table, number, turn);
      }
    });
    unit = next;
  }
}

/// The largest magnitudes of K's groups that are larger than a block.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads, C.blocks_per_sm())
    largest_of_groups(const __grid_constant__ QuantizeParams p) {
  const quantizer::Tables table = quantizer::tables<C>();
  const int unit = static_cast<int>(ptx::block_index());
  quantizer::fill_signs<C>(table);
  quantizer::fetch<C, quantizer::Which::k>(p, table, unit, 0);
  ptx::wait_for_copies();
  ptx::sync_block();
  quantizer::PreparedRow<C, quantizer::Which::k> r;
  if (!r.take(p, table, unit, 0)) return;
  const int thread = static_cast<int>(ptx::thread_index_anew());
  const quantizer::Magnitude m = quantizer::of_block<Codes::s8>(quantizer::magnitude_of(r.values), table,
                                                                thread / warp_size, thread % warp_size, 0);
  if (thread != 0) return;
  GroupLargest* const group =
      p.largest + (C.qk_scales == ScaleGroup::tensor ? 0 : r.at.u.batch * p.heads_kv + r.at.u.head);
  ptx::atomic_max(&group->bits, ptx::bits_of(m.largest));
  if (m.bad) ptx::atomic_max(&group->bad, 1U);
}

namespace quantizer {

/// Channel `c` of row `row` of a tile of keys, which is at `position`, embedded as `embed` does it.
template <QuantizeConfig C>
TANDEM_DEVICE float embedded(const QuantizeParams& p, const u16* tile, int row, int c, i64 position) {
  const u16* const keys = tile + row * quantize_channels(C.head_dim_qk);
  const float x = ptx::unpack<C.element>(ptx::load_shared(keys + c));
  if (c >= p.rotary.dim) return x;
  const int half = p.rotary.dim / 2;
  const bool first = C.interleaved ? c % 2 == 0 : c < half;
  const int step = C.interleaved ? 1 : half;
  const int pair = C.interleaved ? c / 2 : c % half;
  const float y = ptx::unpack<C.element>(ptx::load_shared(keys + (first ? c + step : c - step)));
  const float turned =
      ptx::multiply(y, ptx::load_global(p.rotary.sin + position * p.rotary.sin_stride + pair));
  return ptx::multiply(x, ptx::load_global(p.rotary.cos + position * p.rotary.cos_stride + pair)) +
         (first ? -turned : turned);
}

}  // namespace quantizer

/// K's mean over the keys in use, or over their sample, by channel: a block of threads sums 128 keys of a
/// head in f32, key by key; the last one of a head adds up what all have found, in double. All of the block's
/// loads are in flight at once.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(mean_threads(C)) mean_of_keys(const __grid_constant__ QuantizeParams p) {
  constexpr int threads = mean_threads(C);
  constexpr int vectors = quantize_channels(C.head_dim_qk) / 8;  ///< of a row
  constexpr int pitch = quantize_channels(C.head_dim_qk);
  ptx::launch_next_grid();
  quantizer::Unit u;
  const bool some = quantizer::locate<C>(quantizer::key_side(p), static_cast<int>(ptx::block_index()), u);
  if (!some && u.first != 0) return;
  const bool sampled = u.used > p.mean_all_keys;
  const int step = sampled ? mean_step : 1;
  if (u.first % (step * quant_block) != 0) return;
  const int thread = static_cast<int>(ptx::thread_index());
  const int left = max(0, u.used - u.first);
  const int rows = min(quant_block, sampled ? sampled_keys(left) : left);
  const u16* const first = static_cast<const u16*>(p.k.source) +
                           quantizer::offset_of(p.k.stride, u, u.begin + static_cast<i64>(u.first));
  auto* const tile = reinterpret_cast<ptx::Vec4*>(ptx::dynamic_shared());
#pragma unroll
  for (int i = 0; i < quant_block * vectors / threads; ++i) {
    const int at = i * threads + thread;
    const int row = at / vectors;
    const int col = at % vectors * 8;
    const u16* const from = first + (sampled ? sampled_key(row) : row) * p.k.stride.row;
    if (C.vectors && row < rows && col < C.head_dim_qk) {
      ptx::copy_async(tile + at, reinterpret_cast<const ptx::Vec4*>(from + col));
    } else {
      ptx::store_shared(tile + at,
                        quantizer::load_vector<false>(from, col, C.head_dim_qk, !C.vectors && row < rows));
    }
  }
  ptx::wait_for_copies();
  ptx::sync_block();

  const int c = 2 * thread;
  const bool sums_channels = c < pitch;
  const i64 head = static_cast<i64>(u.entry) * p.heads_kv + u.head;
  float* const sums = p.sums + (head * p.axis_blocks_k + u.block) * pitch + c;
  if (sums_channels) {
    float low = 0.0F;
    float high = 0.0F;
#pragma unroll 8
    for (int row = 0; row < rows; ++row) {
      const u32 pair = ptx::load_shared(reinterpret_cast<const u32*>(tile) + row * (pitch / 2) + thread);
      float a = ptx::unpack<C.element>(static_cast<u16>(pair));
      float b = ptx::unpack<C.element>(static_cast<u16>(pair >> 16));
      if constexpr (C.rotary) {
        a = quantizer::embedded<C>(p, reinterpret_cast<const u16*>(tile), row, c, u.first + row);
        b = quantizer::embedded<C>(p, reinterpret_cast<const u16*>(tile), row, c + 1, u.first + row);
      }
      low += ptx::max_magnitude(0.0F, a) <= quantizer::largest_float ? a : 0.0F;
      high += ptx::max_magnitude(0.0F, b) <= quantizer::largest_float ? b : 0.0F;
    }
    ptx::store_global(reinterpret_cast<ptx::Float2*>(sums), ptx::Float2{low, high});
  }

  auto* const before = reinterpret_cast<u32*>(ptx::dynamic_shared());
  ptx::sync_block();
  if (thread == 0) {
    ptx::store_shared(before, ptx::atomic_add_ordered(p.arrived + u.batch * p.heads_kv + u.head, 1U));
  }
  ptx::sync_block();
  if (ptx::load_shared(before) + 1 == static_cast<u32>(max(ceil_div(u.blocks, step), 1)) && sums_channels) {
    double low_sum = 0.0;
    double high_sum = 0.0;
    const float* const all = sums - static_cast<i64>(u.first / quant_block) * pitch;
    constexpr int batch = 16;  // loads in flight
    for (int block = 0; block < u.blocks; block += batch * step) {
      ptx::Float2 pairs[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        pairs[i] = {0.0F, 0.0F};
        const int at = block + i * step;
        if (at >= u.blocks) continue;
        pairs[i] = ptx::load_global(reinterpret_cast<const ptx::Float2*>(all + static_cast<i64>(at) * pitch));
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        low_sum += static_cast<double>(pairs[i].x);
        high_sum += static_cast<double>(pairs[i].y);
      }
    }
    const double used = max(sampled ? sampled_keys(u.used) : u.used, 1);
    float* const mean = p.mean + u.batch * p.mean_stride.batch + u.head * p.mean_stride.head + c;
    if (c < C.head_dim_qk) ptx::store_global(mean, static_cast<float>(low_sum / used));
    if (c + 1 < C.head_dim_qk) ptx::store_global(mean + 1, static_cast<float>(high_sum / used));
  }
}

}  // namespace tandem
