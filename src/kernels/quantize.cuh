// 16-bit Q, K and V to 8-bit codes and scales, all three in one launch. Bound by memory: every element is
// read once and its code written once. Where K's mean is removed, K is read a second time: units that sum its
// channels come first in a chunk of blocks and heads that is small enough for the L2 to keep K meanwhile. (In
// packed tensors they are a launch of their own: wrong cu_seqlens could have units wait for sums of a
// sequence that no unit finds.)
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
  int blocks;        ///< of 128 rows (equal lengths)
  int all_blocks;    ///< of all entries
  int chunk_blocks;  ///< of a chunk, as
  int chunk_heads;
};
TANDEM_DEVICE Side query_side(const QuantizeParams& p) {
  return {{p.cu_seqlens_q, p.seqused_q, p.rows_q, p.batch, p.heads_q, p.packed_q},
          p.blocks_q,
          p.all_blocks_q,
          p.chunk_blocks_q,
          p.chunk_heads * (p.heads_q / p.heads_kv)};
}
TANDEM_DEVICE Side key_side(const QuantizeParams& p) {
  return {{p.cu_seqlens_k, p.seqused_k, p.rows_k, p.batch, p.heads_kv, p.packed_k},
          p.blocks_k,
          p.all_blocks_k,
          p.chunk_blocks_k,
          p.chunk_heads};
}

/// A unit's number in its chunk.
struct UnitNumber {
  int chunk;
  int unit;
};

/// The last of packed sequences whose first block is not past `block`: each warp tries 32 at a time.
TANDEM_DEVICE int sequence_of_block(const tile::RaggedSide& side, int block) {
  const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
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
TANDEM_DEVICE bool locate(const QuantizeParams& p, const Side& side, const UnitNumber& number, Unit& u) {
  const int row_of_chunks = number.chunk / p.head_chunks;
  const int row = number.unit / side.chunk_heads;
  const int block = row_of_chunks * side.chunk_blocks + row;
  u.head = (number.chunk - row_of_chunks * p.head_chunks) * side.chunk_heads + number.unit -
           row * side.chunk_heads;
  u.first = -1;
  if (block >= side.all_blocks) return false;
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

/// Signs of the channels, and means if there are any.
template <int head_dim, bool signs>
TANDEM_DEVICE void fill_tables(const Tables& tables, const float* mean) {
  const int c = static_cast<int>(ptx::thread_index());
  if (c < quantize_channels(head_dim)) {
    if (signs) ptx::store_shared(tables.sign + c, c < head_dim ? rotation_sign(c) : 1.0F);
    if (mean != nullptr)
      ptx::store_shared(tables.mean + c, c < head_dim ? ptx::load_written(mean + c) : 0.0F);
  }
  ptx::sync_block();
}

/// The scale of the row's group. Stored by one thread of those that share it.
template <QuantizeConfig C, Codes codes, ScaleGroup group>
TANDEM_DEVICE float find_scale(const QuantizeParams& p, const QuantizedTensor& x, const Tables& tables,
                               const Unit& u, int row, Magnitude m) {
  const int thread = static_cast<int>(ptx::thread_index());
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
    m = of_block<codes>(m, tables, thread / warp_size, lane);
  }
  const Scale s = scale_for<codes>(m);
  if (stores) ptx::store_global(x.scales + offset_of(x.scale_stride, u, at), s.stored);
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

enum class Which : int { q, k };

/// Until the mean of a (batch, kv head) of so many blocks is there. Each thread that reads it waits.
TANDEM_DEVICE void await_mean(const QuantizeParams& p, int head, int blocks) {
  if (p.units_mean == 0) {
    ptx::wait_for_previous_grid();
  } else {
    ptx::wait_turn(p.arrived + head, static_cast<u32>(blocks) + 1);
  }
}

/// A thread's part of a row of Q or K, ready to be scaled.
template <QuantizeConfig C, Which which>
struct PreparedRow {
  Row<C.head_dim_qk> values;
  Unit u;
  int t;
  int row;
  bool used;

  /// False where there is nothing to do.
  TANDEM_DEVICE bool load(const QuantizeParams& p, const Tables& table, const UnitNumber& number) {
    const QuantizedTensor& x = which == Which::q ? p.q : p.k;
    const int thread = static_cast<int>(ptx::thread_index());
    const bool some = locate<C>(p, which == Which::q ? query_side(p) : key_side(p), number, u);
    // A group without rows has a scale.
    if (!some && !(exceeds_block(C.qk_scales) && u.first == 0)) return false;
    t = thread % row_threads;
    row = thread / row_threads;
    used = u.first + row < u.used;
    RawRow<C.head_dim_qk> raw;
    const u16* const source = static_cast<const u16*>(x.source) + offset_of(x.stride, u, tensor_row());
    load_row<C.vectors>(raw, source, used, t);
    const float* mean = nullptr;
    if constexpr (C.smooth_k) {
      // Of K: a sequence without keys has no mean.
      int keys = u.used;
      if (which == Which::q) {
        keys = C.ragged ? tile::other_side(key_side(p).rows, u.batch).used : p.rows_k;
      }
      const int head = which == Which::q ? u.head / (p.heads_q / p.heads_kv) : u.head;
      if (keys > 0) {
        mean = p.mean + u.batch * p.mean_stride.batch + head * p.mean_stride.head;
        await_mean(p, u.batch * p.heads_kv + head, ceil_div(keys, quant_block));
      }
    }
    fill_tables<C.head_dim_qk, C.rotate_qk>(table, mean);
    widen<C.element>(values, raw);
    if constexpr (C.rotary) {
      if (used) embed<C>(values, p.rotary, source, u.first + row, t);
    }
    if constexpr (C.smooth_k && which == Which::k) {
      if (mean != nullptr && used) subtract(values, table.mean, t);  // the others' values stay 0
    }
    if constexpr (C.smooth_k && which == Which::q) {
      const float shift = mean != nullptr ? dot(values, table.mean, t) * p.scale : 0.0F;
      if (t == 0 && used) {
        const i64 at = static_cast<i64>(u.block) * quant_block + row;
        ptx::store_global(p.shift + offset_of(p.shift_stride, u, at), shift);
      }
    }
    if constexpr (C.rotate_qk) rotate(values, table.sign, t);
    return true;
  }
  TANDEM_DEVICE i64 tensor_row() const { return u.begin + static_cast<i64>(u.first + row); }
};

template <QuantizeConfig C, Which which>
TANDEM_DEVICE void quantize_rows(const QuantizeParams& p, const UnitNumber& number) {
  const QuantizedTensor& x = which == Which::q ? p.q : p.k;
  const Tables table = tables<C>();
  PreparedRow<C, which> r;
  if (!r.load(p, table, number)) return;
  const Magnitude m = magnitude_of(r.values);
  float inverse = find_scale<C, C.qk, C.qk_scales>(p, x, table, r.u, r.row, m);
  // The sign of the softmax's scale goes with Q: the attention kernel knows positive ones only.
  if (which == Which::q && p.scale < 0.0F) inverse = -inverse;
  if (!r.used) return;
  u8* const codes = x.codes + offset_of(x.code_stride, r.u, r.tensor_row());
#pragma unroll
  for (int j = 0; j < Row<C.head_dim_qk>::vectors; ++j) {
    store_codes<C.vectors>(x, codes, (4 * j + r.t) * 8, encode<C.qk>(r.values.x[j], inverse, m.bad));
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

/// The key of a unit whose row of V the thread has: a warp has two words of four keys, and its lanes take
/// them in the order in which they are stored.
TANDEM_DEVICE int key_of_thread(int thread) {
  return thread / warp_size / 2 * 16 +
         v_key_of(thread / warp_size % 2 * 8 + thread % warp_size / row_threads);
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
  // Unrolled, the one turn of head dimension 64 takes a register that three blocks of threads have not.
#pragma unroll(head_dim <= 64 ? 1 : 4)
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
TANDEM_DEVICE void quantize_values(const QuantizeParams& p, const UnitNumber& number) {
  constexpr int head_dim = C.head_dim_v;
  const QuantizedTensor& x = p.v;
  Unit u;
  if (!locate<C>(p, key_side(p), number, u)) return;
  const int thread = static_cast<int>(ptx::thread_index());
  const int t = thread % row_threads;
  const int key = key_of_thread(thread);
  const bool used = u.first + key < u.used;
  const i64 at = u.begin + static_cast<i64>(u.first + key);
  RawRow<head_dim> raw;
  load_row<C.vectors>(raw, static_cast<const u16*>(x.source) + offset_of(x.stride, u, at), used, t);
  const Tables table = tables<C>();
  if constexpr (C.rotate_v) fill_tables<head_dim, true>(table, nullptr);
  Row<head_dim> values;
  widen<C.element>(values, raw);
  if constexpr (C.rotate_v) rotate(values, table.sign, t);
  const Magnitude m = magnitude_of(values);
  const float inverse = find_scale<C, C.pv, C.v_scales>(p, x, table, u, key, m);
#pragma unroll
  for (int j = 0; j < Row<head_dim>::vectors; ++j) {
    put_value_codes(table, thread, j, encode<C.pv>(values.x[j], inverse, m.bad));
  }
  ptx::sync_block();
  store_value_codes<head_dim>(x, table, u, thread);
}

/// Adds up a value of the 8 rows of a warp, all `n` at once: each exchange leaves a thread half of its
/// values, from `first` on. The order of additions is ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
template <int n, int distance = 16>
TANDEM_DEVICE void add_rows(float* x, int lane, int& first) {
  if constexpr (distance >= row_threads) {
    const bool upper = (lane & distance) != 0;
    if (upper) first += n / 2;
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float sent = upper ? x[i] : x[i + n / 2];
      x[i] = (upper ? x[i + n / 2] : x[i]) + ptx::shuffle_xor(sent, distance);
    }
    add_rows<n / 2, distance / 2>(x, lane, first);
  }
}

/// K's mean over the keys in use, by channel: a unit sums its rows in f32, 8 at a time as add_rows does; the
/// last unit of a head adds up what all have found, in double.
template <QuantizeConfig C>
TANDEM_DEVICE void sum_keys(const QuantizeParams& p, const UnitNumber& number) {
  constexpr int pitch = quantize_channels(C.head_dim_qk);
  constexpr int vectors = Row<C.head_dim_qk>::vectors;
  constexpr int warps = quantize_threads / warp_size;
  Unit u;
  const bool some = locate<C>(p, key_side(p), number, u);
  if (!some && u.first != 0) return;
  const int thread = static_cast<int>(ptx::thread_index());
  const int lane = thread % warp_size;
  const int row = thread / row_threads;
  const int t = thread % row_threads;
  const bool used = u.first + row < u.used;
  const u16* const source = static_cast<const u16*>(p.k.source) +
                            offset_of(p.k.stride, u, u.begin + static_cast<i64>(u.first + row));
  RawRow<C.head_dim_qk> raw;
  load_row<C.vectors>(raw, source, used, t);
  Row<C.head_dim_qk> values;
  widen<C.element>(values, raw);
  if constexpr (C.rotary) {
    if (used) embed<C>(values, p.rotary, source, u.first + row, t);
  }
  float x[8 * vectors];
#pragma unroll
  for (int i = 0; i < 8 * vectors; ++i) {
    const float value = values.x[i / 8][i % 8];
    x[i] = ptx::max_magnitude(0.0F, value) <= largest_float ? value : 0.0F;
  }
  int first = 0;
  add_rows<8 * vectors>(x, lane, first);
  const Tables table = tables<C>();
  auto* const sums = reinterpret_cast<float*>(table.tile);
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int at = first + i;
    ptx::store_shared(sums + thread / warp_size * pitch + (4 * (at / 8) + t) * 8 + at % 8, x[i]);
  }
  ptx::sync_block();
  const i64 head = static_cast<i64>(u.entry) * p.heads_kv + u.head;
  float* const kept = p.sums + (head * p.axis_blocks_k + u.block) * pitch + thread;
  if (thread < pitch) {
    float sum = 0.0F;
#pragma unroll
    for (int w = 0; w < warps; ++w) sum += ptx::load_shared(sums + w * pitch + thread);
    ptx::store_global(kept, sum);
  }
  ptx::sync_block();
  u32* const arrived = p.arrived + u.batch * p.heads_kv + u.head;
  if (thread == 0) ptx::store_shared(table.warp_bad, ptx::atomic_add_ordered(arrived, 1U));
  ptx::sync_block();
  if (ptx::load_shared(table.warp_bad) + 1 != static_cast<u32>(max(u.blocks, 1))) return;
  if (thread < pitch) {
    const float* const all = kept - static_cast<i64>(u.first / quant_block) * pitch;
    double sum = 0.0;
    constexpr int batch =
        C.blocks_per_sm() > 2 ? 8 : 32;  // loads in flight, as many as there are registers for
    for (int block = 0; block < u.blocks; block += batch) {
      float several[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        several[i] =
            block + i < u.blocks ? ptx::load_written(all + static_cast<i64>(block + i) * pitch) : 0.0F;
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) sum += static_cast<double>(several[i]);
    }
    float* const mean = p.mean + u.batch * p.mean_stride.batch + u.head * p.mean_stride.head + thread;
    if (thread < C.head_dim_qk) ptx::store_global(mean, static_cast<float>(sum / max(u.used, 1)));
  }
  ptx::sync_block();
  if (thread == 0) ptx::raise_turn(arrived);
}

}  // namespace quantizer

/// Chunk by chunk, units of K's mean, of V (while the last sums come in), K and Q.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads, C.blocks_per_sm())
    quantize(const __grid_constant__ QuantizeParams p) {
  ptx::launch_next_grid();
  const int units = p.units_mean + p.units_v + p.units_k + p.units_q;
  const int chunk = static_cast<int>(ptx::block_index()) / units;
  int unit = static_cast<int>(ptx::block_index()) - chunk * units;
  if (unit < p.units_mean) {
    if constexpr (C.smooth_k) quantizer::sum_keys<C>(p, {chunk, unit});
  } else if (unit -= p.units_mean; unit < p.units_v) {
    if constexpr (C.pv != Codes::input) quantizer::quantize_values<C>(p, {chunk, unit});
  } else if (unit -= p.units_v; unit < p.units_k) {
    quantizer::quantize_rows<C, quantizer::Which::k>(p, {chunk, unit});
  } else {
    quantizer::quantize_rows<C, quantizer::Which::q>(p, {chunk, unit - p.units_k});
  }
}

/// The largest magnitudes of K's groups that are larger than a block.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads, C.blocks_per_sm())
    largest_of_groups(const __grid_constant__ QuantizeParams p) {
  const quantizer::Tables table = quantizer::tables<C>();
  quantizer::PreparedRow<C, quantizer::Which::k> r;
  if (!r.load(p, table, {0, static_cast<int>(ptx::block_index())})) return;
  const int thread = static_cast<int>(ptx::thread_index());
  const quantizer::Magnitude m = quantizer::of_block<Codes::s8>(quantizer::magnitude_of(r.values), table,
                                                                thread / warp_size, thread % warp_size);
  if (thread != 0) return;
  GroupLargest* const group =
      p.largest + (C.qk_scales == ScaleGroup::tensor ? 0 : r.u.batch * p.heads_kv + r.u.head);
  ptx::atomic_max(&group->bits, ptx::bits_of(m.largest));
  if (m.bad) ptx::atomic_max(&group->bad, 1U);
}

/// K's mean alone, for the launches after it.
template <QuantizeConfig C>
TANDEM_KERNEL __launch_bounds__(quantize_threads, C.blocks_per_sm())
    mean_of_keys(const __grid_constant__ QuantizeParams p) {
  ptx::launch_next_grid();
  quantizer::sum_keys<C>(p, {0, static_cast<int>(ptx::block_index())});
}

}  // namespace tandem
