// Transposes caller-supplied, row-major V into the tiles that P V reads: keys contiguous, in the order of
// quantized_layout.hpp. Three warps of the producer's warpgroup do it beside the attention, each on its own
// and whatever tile their CTA is at: all blocks of V are cut into strips, each of which some warp of the grid
// claims, transposes and puts into the workspace, where the loaders of all CTAs find it.
//
// Strips are claimed in the order in which tiles of queries want them: head by head, and in each from the
// last keys to the first. (The order of a causal grid's last heads is another, in which blocks go before
// heads. By then all of V is transposed, or the grid is so small that the first claims of its warps are all
// there are.)
#pragma once

#include "ops/eight_bit/sm90/eight_bit_producer.cuh"
#include "ptx/eight_bit.cuh"

namespace tandem {

template <EightBitConfig C>
struct ValueTransposer {
  using Shared = EightBitShared<C>;
  static constexpr int strips = value_strips(C.tiling.head_dim_v);

  /// A strip of a block of keys: what is left to know of it once its rows are on their way.
  struct Unit {
    int block;  ///< number of all
    int head;   ///< number of its sequence and KV head
    int strip;
    int keys;  ///< that the sequence has from the block's first on
    u32 sign;  ///< what negates four values if the block's scale is negative

    TANDEM_DEVICE int channels() const {
      return min(value_strip_columns, C.tiling.head_dim_v - strip * value_strip_columns);
    }
  };

  const EightBitKernelParams<C>& p;
  Shared& shared;
  const int warp;  ///< number among those that transpose
  const int lane;
  u32 phase = 0;
  int first_sequence = 0;  ///< lane 0 has
  int units_before = 0;    ///< that sequences before it have

  TANDEM_DEVICE ValueTransposer(const EightBitKernelParams<C>& params, Shared& s, int warp_)
      : p(params), shared(s), warp(warp_), lane(static_cast<int>(ptx::thread_index()) % warp_size) {}

  TANDEM_DEVICE auto& rows() const { return shared.strips.rows[warp]; }
  TANDEM_DEVICE auto& columns() const { return shared.strips.columns[warp]; }
  TANDEM_DEVICE ptx::Mbarrier& full() const { return shared.strip_barriers.full[warp]; }

  // ---- Which strip ----

  /// Claims a number, which lane 0 has: others get 0.
  TANDEM_DEVICE u32 claim() const { return lane == 0 ? ptx::atomic_add(p.transposed.claimed, 1U) : 0U; }

  /// The fields that say which keys are seen.
  TANDEM_DEVICE tile::TileIndex sequence(int batch) const {
    const ForwardParams& f = p.forward;
    tile::TileIndex t;
    t.batch = batch;
    t.seqlen_q = f.rows_q;
    t.seqlen_k = f.rows_k;
    if constexpr (C.mask.varlen) {
      t.seqlen_q = tile::sequence_rows(f.cu_seqlens_q, f.seqused_q, f.rows_q, batch).used;
      const tile::SequenceRows keys = tile::sequence_rows(f.cu_seqlens_k, f.seqused_k, f.rows_k, batch);
      t.begin_k = keys.begin;
      t.seqlen_k = keys.used;
    }
    return t;
  }
  TANDEM_DEVICE int units_of(const tile::TileIndex& t) const {
    const tile::BlockRange seen = value_blocks<C>(p, t);
    return max(seen.end - seen.first, 0) * p.forward.heads_kv * strips;
  }
  /// The sequence that has unit `number`, which becomes its number there. False: none has it. A warp's
  /// numbers ascend, so that it goes on where it stopped, 32 sequences at a time.
  TANDEM_DEVICE bool locate(int& number, int& batch) {
    if constexpr (!C.mask.varlen) {
      const int each = units_of(sequence(0));
      batch = each == 0 ? p.forward.batch : number / each;
      number -= batch * each;
      return batch < p.forward.batch;
    } else {
      return locate_among_lengths(number, batch);
    }
  }
  TANDEM_DEVICE bool locate_among_lengths(int& number, int& batch) {
    for (; first_sequence < p.forward.batch; first_sequence += warp_size) {
      const int own = first_sequence + lane;
      const int units = own < p.forward.batch ? units_of(sequence(own)) : 0;
      int through = units;
#pragma unroll
      for (int d = 1; d < warp_size; d *= 2) {
        const int lower = static_cast<int>(ptx::shuffle_up(static_cast<u32>(through), d));
        if (lane >= d) through += lower;
      }
      const u32 beyond = ptx::ballot(units_before + through > number);
      if (beyond != 0) {
        const int owner = ptx::find_first_set(beyond);
        batch = first_sequence + owner;
        number -= units_before + static_cast<int>(ptx::shuffle(static_cast<u32>(through - units), owner));
        return true;
      }
      units_before += static_cast<int>(ptx::shuffle(static_cast<u32>(through), warp_size - 1));
    }
    return false;
  }

  /// Starts loading the unit of that number, which lane 0 has. False: there is none.
  TANDEM_DEVICE bool begin(u32 claimed, Unit& u) {
    int number = ptx::warp_uniform(static_cast<int>(claimed));
    int batch = 0;
    if (!locate(number, batch)) return false;
    const tile::TileIndex t = sequence(batch);
    const tile::BlockRange seen = value_blocks<C>(p, t);
    const int of_head = (seen.end - seen.first) * strips;
    const int head = number / of_head;
    const int within = number - head * of_head;
    const int block = seen.end - 1 - within / strips;
    u.strip = within % strips;
    if (lane == 0) {
      ptx::mbarrier_arrive_expect(full(), rows().bytes);
      ptx::tma_load(rows().data, p.forward.v, full(), u.strip * value_strip_columns,
                    t.begin_k + block * quant_block, head, p.forward.packed_k ? 0 : batch,
                    ptx::CacheHint::first);
    }
    u.block = value_block(p, batch, head, t.begin_k, block);
    u.head = batch * p.forward.heads_kv + head;
    u.keys = t.seqlen_k - block * quant_block;
    u.sign = load_scale<C>(p.v_scales, batch, head, block) < 0.0F ? 0x80808080U : 0U;
    return true;
  }

  // ---- One strip ----

  /// Transposes all keys of 16 channels. Of 32 keys a lane has, in each of four groups of 8, two channels of
  /// two neighbouring keys. Two such groups form the words of two channels that a quad of the consumers
  /// reads: stored position 4 q + i of 16 holds key 2 q + i % 2 + 8 (i / 2).
  TANDEM_DEVICE void transpose(int channel, int keys, u32 sign) {
    constexpr int pieces = quant_block / 32;
    const auto& from = rows();
    auto& to = columns();
    const char* const source = from.data + from.place(lane, channel);
    // With lengths there are registers for less.
    constexpr int at_once = C.mask.varlen ? 1 : pieces;
    u32 pairs[at_once][4];
    const auto load = [&](int n) {
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        ptx::ldmatrix_x4_transposed(source + (n + i) * 32 * from.strip_cols, pairs[i]);
      }
    };
    // The lower 16 lanes store even channels first, the upper ones odd channels: the eight rows of a matrix
    // are then in eight different groups of banks.
    const bool odd = lane >= 16;
    const u32 first = odd ? 0x7531U : 0x6420U;
    const u32 second = odd ? 0x6420U : 0x7531U;
    const int row = channel + lane % 8 * 2 + ((lane % 8 / 4) ^ (lane / 8 & 1));
    const u32 target = to.place(row, lane / 16 * 16);
#pragma unroll
    for (int n = 0; n < pieces; ++n) {
      u32(&x)[4] = pairs[n % at_once];
      if (n % at_once == 0) load(n);
      if constexpr (C.mask.varlen) clear_from(keys - 32 * n, x);
      ptx::stmatrix_x4(
          to.data + (target ^ static_cast<u32>(32 * n)), ptx::permute_bytes(x[0], x[1], first) ^ sign,
          ptx::permute_bytes(x[0], x[1], second) ^ sign, ptx::permute_bytes(x[2], x[3], first) ^ sign,
          ptx::permute_bytes(x[2], x[3], second) ^ sign);
    }
  }
  /// Sets keys from `end` on, of 32, to 0: rows past a sequence's end may hold NaN.
  TANDEM_DEVICE void clear_from(int end, u32 (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 8 * i + lane % 4 * 2;
      if (key + 1 >= end) x[i] = key >= end ? 0 : x[i] & 0xFFFFU;
    }
  }

  TANDEM_DEVICE void transpose(const Unit& u) {
    ptx::mbarrier_wait(full(), phase);
    phase ^= 1;
#pragma unroll 1
    for (int channel = 0; channel < u.channels(); channel += 16) transpose(channel, u.keys, u.sign);
    ptx::fence_async_shared();
    ptx::sync_warp();
  }
  TANDEM_DEVICE void store(const Unit& u) const {
    if (lane != 0) return;
    const int channel = u.block * C.tiling.head_dim_v + u.strip * value_strip_columns;
    ptx::bulk_store(p.transposed.data + static_cast<i64>(channel) * quant_block, columns().data,
                    static_cast<u32>(u.channels() * quant_block));
    ptx::tma_store_commit();
  }
  /// Tells the loaders of `u`, whose store is the last one.
  TANDEM_DEVICE void announce(const Unit& u) const {
    if (lane == 0) {
      ptx::tma_store_wait_written<0>();
      ptx::semaphore_increment(p.transposed.blocks + u.block);
      ptx::semaphore_increment(p.transposed.heads + u.head);
    }
    ptx::sync_warp();  // `columns` are free
  }

  /// A unit's store is under way beside the next one's load, and a claim beside its transposition.
  TANDEM_DEVICE void run() {
    Unit unit;
    for (bool more = false;;) {
      const u32 number = claim();
      if (more) {
        transpose(unit);
        store(unit);
      }
      Unit next;
      const bool again = begin(number, next);
      if (more) announce(unit);
      if (!again) return;
      unit = next;
      more = true;
    }
  }
};

}  // namespace tandem
