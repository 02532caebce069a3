// Which tiles a persistent CTA computes, and in which order.
#pragma once

#include "ops/forward/config.hpp"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/pipeline.cuh"
#include "tile/rows.cuh"

namespace tandem::tile {

/// Clamps a row count or offset, so that no content of the user's arrays leads outside the tensors.
TANDEM_DEVICE int clamp_to(int value, int low, int high) {
  return max(low, min(value, high));
}

TANDEM_DEVICE int length_at(const LengthArray& lengths, int i) {
  const long long at = static_cast<long long>(i) * lengths.stride;
  if (!lengths.wide) return ptx::load_global(static_cast<const int*>(lengths.data) + at);
  const long long value = ptx::load_global(static_cast<const long long*>(lengths.data) + at);
  return static_cast<int>(max(-1LL, min(value, 0x7fffffffLL)));
}

/// Rows of one sequence as problem.hpp's sequence_rows has them.
struct SequenceRows {
  int begin;
  int used;
  int end;
};
TANDEM_DEVICE SequenceRows sequence_rows(const LengthArray& cu, const LengthArray& used, int rows, int b) {
  SequenceRows r{0, rows, rows};
  if (cu.data != nullptr) {
    r.begin = clamp_to(length_at(cu, b), 0, rows);
    r.end = clamp_to(length_at(cu, b + 1), r.begin, rows);
  }
  r.used = r.end - r.begin;
  if (used.data != nullptr) r.used = clamp_to(length_at(used, b), 0, r.used);
  return r;
}

/// The last of `count` ascending numbers that is not past `at`, or number 0: first(i) is the i-th. All lanes
/// of a warp call, and try 32 at a time.
template <typename First>
TANDEM_DEVICE int last_not_past(int lane, int count, int at, First first) {
  int from = 0;  // the answer is in [from, from + left)
  for (int left = count; left > 1;) {
    const int step = ceil_div(left, warp_size);
    const int i = lane * step;
    const bool past = i >= left || first(from + i) > at;
    const u32 beyond = ptx::ballot(past);
    const int steps = beyond == 0 ? warp_size : ptx::find_first_set(beyond);
    from += max(steps - 1, 0) * step;
    left = min(step, count - from);
  }
  return from;
}

/// Static persistent scheduler: CTA i takes tiles i, i + grid size, and so on. `alternate`: every second
/// round runs backwards, so that CTAs get the same amount of work where it descends with the tile number.
template <bool alternate>
struct StaticScheduler {
  int round = 0;

  TANDEM_DEVICE int next() {
    const int blocks = static_cast<int>(ptx::grid_size());
    const int block = static_cast<int>(ptx::block_index());
    const int rank = alternate && (round & 1) ? blocks - 1 - block : block;
    return round++ * blocks + rank;
  }
};

/// A tile as the producer hands it over.
struct alignas(16) GivenTile {
  TileIndex index;  ///< m below 0: there are no more
};

/// Dynamic persistent scheduler: tile numbers from a counter in global memory. The producer warp takes one
/// ahead, finds the tile, and hands it to the consumers through shared memory: each of their warps would take
/// some hundred cycles for the divisions, and longer for a search with varlen. Without a counter there is a
/// CTA for every tile.
struct DynamicScheduler {
  struct Shared {
    Ring<2> ring;
    GivenTile tile[2];
  };

  Shared& shared;
  u32* counter;
  Ring<2>::Position at;
  bool first = true;
  int team = 0;  ///< which of the CTA's producers this is: each takes tiles for a team of consumers
  int teams = 1;

  TANDEM_DEVICE DynamicScheduler(Shared& s, u32* c) : shared(s), counter(c) {}

  TANDEM_DEVICE void set_team(int own, int all) {
    team = own;
    teams = all;
  }
  /// The next number. All lanes of the producer warp; `leader` on one of them.
  TANDEM_DEVICE int take(bool leader) {
    u32 tile = 0;
    if (leader) {
      tile = team * ptx::grid_size() + ptx::block_index();
      if (!first) tile = teams * ptx::grid_size() + (counter != nullptr ? ptx::atomic_add(counter, 1U) : 0U);
    }
    first = false;
    // The leader is the only lane with a number other than 0.
    return static_cast<int>(ptx::reduce_or(tile));
  }
  /// Gives a tile to the consumers, or its number. As `take`.
  template <typename Given>
  TANDEM_DEVICE void give(const Given& given, bool leader) {
    if (leader) {
      ptx::mbarrier_wait(shared.ring.empty[at.stage], at.phase ^ 1);
      ptx::store_shared(place<Given>(), given);
      ptx::mbarrier_arrive(shared.ring.full[at.stage]);
    }
    at.advance();
  }
  /// What the producer gives. All lanes of a consumer warp.
  template <typename Given>
  TANDEM_DEVICE Given receive(bool leader) {
    shared.ring.wait(at);
    const Given given = ptx::load_shared(place<Given>());
    ptx::sync_warp();
    if (leader) shared.ring.release(at);
    at.advance();
    return given;
  }

 private:
  template <typename Given>
  TANDEM_DEVICE Given* place() {
    return reinterpret_cast<Given*>(&shared.tile[at.stage]);
  }
};

/// Tiles of sequences of one length, head by head, so that CTAs that run at the same time share K and V in
/// the L2. Where tiles differ in work, a head's longest tiles come first, and the last heads are interleaved:
/// the longest tiles of all of them first, so that the tiles that start last are short.
template <bool longest_first>
struct DenseTiles {
  TANDEM_DEVICE bool locate(const ForwardParams& p, int tile, TileIndex& t) {
    const int heads = p.heads_q * p.batch;
    if (tile >= heads * p.m_blocks) return false;
    const int late = tile - p.heads_in_order * p.m_blocks;
    const bool interleaved = longest_first && late >= 0;
    const int heads_before = interleaved ? p.heads_in_order : tile / p.m_blocks;
    const int interleaved_heads = interleaved ? heads - p.heads_in_order : 1;
    const int within = tile - heads_before * p.m_blocks;
    const int head = within % interleaved_heads;
    t.m = longest_first ? p.m_blocks - 1 - within / interleaved_heads : within;
    const int batch_head = heads_before + head;
    t.batch = batch_head / p.heads_q;
    t.head = batch_head - t.batch * p.heads_q;
    set_rows(p, t);
    return true;
  }
  /// Makes the tile that the producer gives `t`.
  static TANDEM_DEVICE void take(const ForwardParams& p, const TileIndex& given, TileIndex& t) {
    t.m = ptx::warp_uniform(given.m);
    t.head = given.head;
    t.batch = given.batch;
    set_rows(p, t);
  }

 private:
  static TANDEM_DEVICE void set_rows(const ForwardParams& p, TileIndex& t) {
    t.begin_q = 0;
    t.begin_k = 0;
    t.seqlen_q = p.rows_q;
    t.seqlen_k = p.rows_k;
    t.end_q = p.rows_q;
  }
};

/// One side (queries or keys) of a varlen batch, whose lengths only the device knows.
struct VarlenSide {
  const LengthArray& cu;
  const LengthArray& used;
  int rows;
  int batch;
  int heads;
  bool packed;
};

/// A block of one sequence's rows, and its head.
struct VarlenBlock {
  int block;
  int blocks;  ///< that the sequence has
  int head;
  int batch;
  SequenceRows rows;
};

/// Blocks of `size` rows of such sequences, numbered sequence by sequence and in each head by head. Each warp
/// walks the sequences 32 at a time with a prefix sum. A CTA's tile numbers ascend, so it continues where it
/// stopped. All 32 lanes call.
struct VarlenBlocks {
  int first = 0;   ///< sequence of lane 0
  int before = 0;  ///< tiles of the sequences before `first`

  TANDEM_DEVICE bool locate(const VarlenSide& side, int size, int tile, VarlenBlock& t) {
    const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
    // In packed tensors, rows past the last sequence and rows before the first count as two more sequences,
    // of which no row is in use.
    const int sequences = side.batch + (side.packed ? 2 : 0);
    SequenceRows r{0, 0, 0};
    int owner = 0;  ///< the lane whose sequence has the tile
    int in_sequence = 0;
    bool found = false;
    for (; first < sequences; first += warp_size) {
      const int b = first + lane;
      r = {0, 0, 0};
      if (b < side.batch) r = sequence_rows(side.cu, side.used, side.rows, b);
      if (b == side.batch && side.packed) {
        r.begin = clamp_to(length_at(side.cu, b), 0, side.rows);
        r.end = side.rows;
      }
      if (b == side.batch + 1 && side.packed) r.end = clamp_to(length_at(side.cu, 0), 0, side.rows);
      const int tiles = ceil_div(r.end - r.begin, size) * side.heads;
      int through = tiles;
#pragma unroll
      for (int d = 1; d < warp_size; d *= 2) {
        const int lower = static_cast<int>(ptx::shuffle_up(static_cast<u32>(through), d));
        if (lane >= d) through += lower;
      }
      const u32 beyond = ptx::ballot(before + through > tile);
      if (beyond != 0) {
        owner = ptx::find_first_set(beyond);
        in_sequence = tile - before - pick(through - tiles, owner);
        found = true;
        break;
      }
      before += pick(through, warp_size - 1);
    }
    // ptxas does not see that all lanes leave the loop with the same values. Without a shuffle of each value
    // it computes WGMMA descriptors in ordinary registers, with up to 45 moves to uniform registers between
    // the products of a block.
    if (ptx::warp_uniform(found ? 1 : 0) == 0) return false;
    owner = ptx::warp_uniform(owner);
    in_sequence = ptx::warp_uniform(in_sequence);
    t.batch = ptx::warp_uniform(first + owner);
    t.rows.begin = ptx::warp_uniform(pick(r.begin, owner));
    t.rows.used = ptx::warp_uniform(pick(r.used, owner));
    t.rows.end = ptx::warp_uniform(pick(r.end, owner));
    t.blocks = ceil_div(t.rows.end - t.rows.begin, size);
    t.head = in_sequence / t.blocks;
    t.block = in_sequence - t.head * t.blocks;
    return true;
  }

 private:
  static TANDEM_DEVICE int pick(int value, int lane) {
    return static_cast<int>(ptx::shuffle(static_cast<u32>(value), lane));
  }
};

/// Rows of sequence `b` on the other side (keys for queries): none past the last sequence. All lanes get the
/// same values.
TANDEM_DEVICE SequenceRows other_side(const VarlenSide& side, int b) {
  const SequenceRows r =
      b < side.batch ? sequence_rows(side.cu, side.used, side.rows, b) : SequenceRows{0, 0, 0};
  return {ptx::warp_uniform(r.begin), ptx::warp_uniform(r.used), ptx::warp_uniform(r.end)};
}

/// The keys of a cache that take part, of those that lengths say: behind padding, in the entry that an index
/// names, in pages if there are any.
template <KeySource keys>
TANDEM_DEVICE void locate_keys(const ForwardParams& p, TileIndex& t) {
  if constexpr (in_pages(keys)) {
    if (p.pages.count == 0) t.seqlen_k = 0;
  }
  if constexpr (keys == KeySource::padded_pages) {
    if (t.batch < p.batch) {
      t.begin_k = clamp_to(length_at(p.leftpad_k, t.batch), 0, t.seqlen_k);
      t.seqlen_k -= t.begin_k;
    }
  }
  if constexpr (keys != KeySource::entries) return;
  int entry = t.batch;
  if (t.batch < p.batch) {
    if (p.leftpad_k.data != nullptr) {
      t.begin_k = clamp_to(length_at(p.leftpad_k, t.batch), 0, t.seqlen_k);
      t.seqlen_k -= t.begin_k;
    }
    if (p.cache_batch_idx.data != nullptr) entry = length_at(p.cache_batch_idx, t.batch);
  }
  const bool exists = entry >= 0 && entry < p.cache_batch;
  t.batch_k = exists ? entry : 0;
  if (!exists) t.seqlen_k = 0;
}

/// The rows `q` of the tile's sequence, and its keys. All lanes of a warp call.
template <KeySource keys>
TANDEM_DEVICE void locate_sequence(const ForwardParams& p, const SequenceRows& q, TileIndex& t) {
  t.begin_q = q.begin;
  t.seqlen_q = q.used;
  t.end_q = q.end - q.begin;
  const SequenceRows k =
      other_side({p.cu_seqlens_k, p.seqused_k, p.rows_k, p.batch, p.heads_kv, p.packed_k}, t.batch);
  t.begin_k = k.begin;
  t.seqlen_k = k.used;
  locate_keys<keys>(p, t);
  if constexpr (keys == KeySource::entries || keys == KeySource::padded_pages) {
    // All lanes have the same, which ptxas does not see.
    t.batch_k = ptx::warp_uniform(t.batch_k);
    t.begin_k = ptx::warp_uniform(t.begin_k);
    t.seqlen_k = ptx::warp_uniform(t.seqlen_k);
  }
}

/// Tiles of a varlen batch, each sequence's longest first. `interleaved`: those of a sequence's last heads as
/// DenseTiles has them, by as many heads as keep the CTAs of the grid busy.
template <Tiling T, KeySource keys, bool interleaved = false>
struct VarlenTiles {
  VarlenBlocks blocks;

  TANDEM_DEVICE bool locate(const ForwardParams& p, int tile, TileIndex& t) {
    VarlenBlock b;
    const VarlenSide queries{p.cu_seqlens_q, p.seqused_q, p.rows_q, p.batch, p.heads_q, p.packed_q};
    if (!blocks.locate(queries, queries_of_tile<T>(p), tile, b)) return false;
    if constexpr (interleaved) interleave(b, p.heads_q);
    t.batch = b.batch;
    t.head = b.head;
    t.m = b.blocks - 1 - b.block;
    locate_sequence<keys>(p, b.rows, t);
    return true;
  }
  static TANDEM_DEVICE void take(const ForwardParams&, const TileIndex& given, TileIndex& t) {
    t.m = ptx::warp_uniform(given.m);
    t.head = ptx::warp_uniform(given.head);
    t.batch = ptx::warp_uniform(given.batch);
    t.batch_k = ptx::warp_uniform(given.batch_k);
    t.begin_q = ptx::warp_uniform(given.begin_q);
    t.begin_k = ptx::warp_uniform(given.begin_k);
    t.seqlen_q = ptx::warp_uniform(given.seqlen_q);
    t.seqlen_k = ptx::warp_uniform(given.seqlen_k);
    t.end_q = ptx::warp_uniform(given.end_q);
  }

 private:
  static TANDEM_DEVICE void interleave(VarlenBlock& b, int heads) {
    const int last = min(2 * static_cast<int>(ptx::grid_size()) / (b.blocks + 1) + 1, heads);
    const int before = heads - last;
    if (b.head < before) return;
    const int within = (b.head - before) * b.blocks + b.block;
    b.block = within / last;
    b.head = before + within - b.block * last;
  }
};

}  // namespace tandem::tile
