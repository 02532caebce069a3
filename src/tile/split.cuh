// Split-KV: the key blocks of all tiles form a line, of which each CTA takes an equal share. A tile that lies
// in the shares of two or more CTAs leaves a partial result in each. The kernel `decode` merges these itself
// (decode_merge.cuh), the kernel `combine` those of other kernels. Any other tile is computed as without
// splits. Lengths are read on the device, so that a captured graph serves any; a CTA has two partial results
// at most, however long sequences are. With a fixed split size the line is of splits, each of which leaves a
// partial result; where there are more of them than places, of groups of splits, which a CTA merges
// (tile/part_merge.cuh).
//
// With pairs a tile of the line is two tiles, of heads that share keys, which visit the same blocks. A share
// belongs to a cluster of two CTAs, each of which has one of the two, and partial results of its own.
#pragma once

#include "ops/split/config.hpp"
#include "tile/scheduler.cuh"

namespace tandem::tile {

/// Rows of a sequence in q and in k, and its part of the line, or one of its parts.
struct SplitSequence {
  SequenceRows q;
  int begin_k;
  int seqlen_k;
  int batch_k;
  int batch;
  int part;   ///< which of the heads that share keys, where they are several tiles
  u32 tiles;  ///< 0: nothing of it is written
  u32 cost;   ///< what a tile costs, in key blocks; 1 at least, so that every tile has a place in the line
};

struct LineLength {
  u32 total;
  u32 largest;
  u32 tiles;
};

/// The line of a varlen batch, in key blocks, or, if `by_split`, in splits of a fixed number of them. All
/// lanes of a warp call, and get the same values. With `pairs` the first tile of two is located.
template <Tiling T, KeySource keys, bool by_split = false, bool pairs = false>
struct SplitLine {
  const ForwardParams& p;
  int first = 0;   ///< sequence of lane 0
  u32 before = 0;  ///< blocks of the sequences before `first`
  u32 grain = 1;   ///< splits of an item, by_split: a power of merged_group

  /// Key blocks of an item of the line, and its keys.
  TANDEM_DEVICE int item_blocks() const {
    if constexpr (!by_split) return 1;
    constexpr i64 all = (1 << 30) / T.block_n;
    const i64 blocks = static_cast<i64>(p.split_blocks) * grain;
    return static_cast<int>(blocks < all ? blocks : all);
  }
  TANDEM_DEVICE int item_keys() const { return item_blocks() * T.block_n; }

  /// Packed tensors have two more sequences: the rows past the last one and those before the first.
  TANDEM_DEVICE int sequences() const { return p.batch + (p.packed_q ? 2 : 0); }

  /// Tiles of the heads that share keys. The first tiles of all sequences come before the second ones: CTAs
  /// then read the same keys at about the same time, the second of them from the L2.
  TANDEM_DEVICE int parts() const {
    if constexpr (pairs) return p.heads_q / p.heads_kv / 2;
    if constexpr (T.heads_as_rows) return p.heads_q / p.heads_kv;
    return 1;
  }
  TANDEM_DEVICE int entries() const { return sequences() * parts(); }

  TANDEM_DEVICE SplitSequence sequence(int entry) const {
    const int part = T.heads_as_rows ? entry / sequences() : 0;
    const int b = entry - part * sequences();
    SplitSequence s{{0, 0, 0}, 0, 0, 0, b, part, 0, 1};
    if (b < p.batch) {
      s.q = sequence_rows(p.cu_seqlens_q, p.seqused_q, p.rows_q, b);
      const SequenceRows k = sequence_rows(p.cu_seqlens_k, p.seqused_k, p.rows_k, b);
      TileIndex t;
      t.batch = b;
      t.begin_k = k.begin;
      t.seqlen_k = k.used;
      locate_keys<keys>(p, t);
      s.begin_k = t.begin_k;
      s.seqlen_k = t.seqlen_k;
      s.batch_k = t.batch_k;
      s.cost = static_cast<u32>(max(1, blocks_seen(t.seqlen_k)));
    } else if (b == p.batch && p.packed_q) {
      s.q.begin = clamp_to(length_at(p.cu_seqlens_q, b), 0, p.rows_q);
      s.q.end = p.rows_q;
    } else if (b == p.batch + 1 && p.packed_q) {
      s.q.end = clamp_to(length_at(p.cu_seqlens_q, 0), 0, p.rows_q);
    }
    s.tiles = static_cast<u32>(ceil_div(s.q.end - s.q.begin, queries_of_tile<T>(p)) *
                               (T.heads_as_rows ? p.heads_kv : p.heads_q));
    return s;
  }

  /// The items that a tile of such a sequence visits at most: a window shows no more than its width.
  TANDEM_DEVICE int blocks_seen(int seqlen_k) const {
    const int all = ceil_div(seqlen_k, item_keys());
    constexpr int wide = 0x20000000;
    if (p.window_left >= wide || p.window_right >= wide) return all;
    return min(all, ceil_div(queries_of_tile<T>(p) + p.window_left + p.window_right, item_keys()) + 1);
  }

  /// The blocks of the whole line, those of the tile with most, and the tiles.
  TANDEM_DEVICE LineLength length() const {
    const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
    LineLength n{0, 1, 0};
    for (int b = lane; b < entries(); b += warp_size) {
      const SplitSequence s = sequence(b);
      if constexpr (by_split) {  // the sum of 32 lanes is a 32-bit number
        constexpr u64 many = u64{1} << 26;
        const u64 sum = n.total + static_cast<u64>(s.tiles) * s.cost;
        n.total = static_cast<u32>(sum < many ? sum : many);
      } else {
        n.total += s.tiles * s.cost;
      }
      n.largest = max(n.largest, s.cost);
      n.tiles += s.tiles;
    }
#pragma unroll
    for (int d = 1; d < warp_size; d *= 2) {
      n.total += ptx::shuffle_xor(n.total, d);
      n.largest = max(n.largest, ptx::shuffle_xor(n.largest, d));
      n.tiles += ptx::shuffle_xor(n.tiles, d);
    }
    return n;
  }

  /// Makes items so large that there is a place for each, and returns the line's length.
  TANDEM_DEVICE LineLength set_grain() {
    LineLength n = length();
    if constexpr (by_split) {
      for (int level = 0; level < p.split_levels; ++level) {
        if (n.total <= static_cast<u32>(p.split_items) && n.largest <= combine_items) break;
        grain *= merged_group;
        n = length();
      }
    }
    return n;
  }

  /// The tile that block `at` of the line belongs to, and where in the line the tile starts. `at` is in the
  /// line, and not before that of an earlier call.
  TANDEM_DEVICE void locate(u32 at, TileIndex& t, u32& start, u32& cost) {
    u32 none = 0;
    search<false>(at, t, start, cost, none);
  }
  /// Locates the `number`-th tile; false if there are fewer. Once.
  TANDEM_DEVICE bool locate_tile(u32 number, TileIndex& t, u32& start, u32& cost) {
    u32 items = 0;
    return search<true>(number, t, start, cost, items);
  }

 private:
  /// `items` before lane 0's sequence, where tiles are counted.
  template <bool by_tile>
  TANDEM_DEVICE bool search(u32 at, TileIndex& t, u32& start, u32& cost, u32& items) {
    const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
    SplitSequence s{};
    u32 through = 0;
    u32 items_through = 0;
    u32 beyond = 0;
    for (;; first += warp_size) {
      s = first + lane < entries() ? sequence(first + lane) : SplitSequence{};
      through = sum_of_lanes_through(by_tile ? s.tiles : s.tiles * s.cost);
      if constexpr (by_tile) items_through = sum_of_lanes_through(s.tiles * s.cost);
      beyond = ptx::ballot(before + through > at);
      if (beyond != 0 || first + warp_size >= entries()) break;
      before += ptx::shuffle(through, warp_size - 1);
      if constexpr (by_tile) items += ptx::shuffle(items_through, warp_size - 1);
    }
    if constexpr (by_tile) {
      if (ptx::warp_uniform(beyond != 0 ? 1 : 0) == 0) return false;
    }
    const int owner = ptx::warp_uniform(ptx::find_first_set(beyond));
    const auto pick = [&](int value) {
      return ptx::warp_uniform(static_cast<int>(ptx::shuffle(static_cast<u32>(value), owner)));
    };
    cost = static_cast<u32>(pick(static_cast<int>(s.cost)));
    u32 tile = 0;
    if constexpr (by_tile) {
      tile = at - before - static_cast<u32>(pick(static_cast<int>(through - s.tiles)));
      start =
          items + static_cast<u32>(pick(static_cast<int>(items_through - s.tiles * s.cost))) + tile * cost;
    } else {
      const u32 sequence_start =
          before + static_cast<u32>(pick(static_cast<int>(through - s.tiles * s.cost)));
      tile = (at - sequence_start) / cost;
      start = sequence_start + tile * cost;
    }
    t.batch = pick(s.batch);
    t.begin_q = pick(s.q.begin);
    t.seqlen_q = pick(s.q.used);
    t.end_q = pick(s.q.end) - t.begin_q;
    t.begin_k = pick(s.begin_k);
    t.seqlen_k = pick(s.seqlen_k);
    t.batch_k = pick(s.batch_k);
    const int m_blocks = ceil_div(t.end_q, queries_of_tile<T>(p));
    t.head = static_cast<int>(tile) / m_blocks;
    t.m = static_cast<int>(tile) - t.head * m_blocks;
    if constexpr (T.heads_as_rows) t.head = t.head * parts() + pick(s.part);
    if constexpr (pairs) t.head *= 2;
    return true;
  }

  /// The sum of `value` of this lane and those before it.
  static TANDEM_DEVICE u32 sum_of_lanes_through(u32 value) {
    const int lane = static_cast<int>(ptx::thread_index()) % warp_size;
#pragma unroll
    for (int d = 1; d < warp_size; d *= 2) {
      const u32 lower = ptx::shuffle_up(value, d);
      if (lane >= d) value += lower;
    }
    return value;
  }
};

/// The items of a CTA's share. They are as many for all but the last: the time is that of the largest share,
/// and fewer shares leave fewer partial results. Where a sixteenth more makes it a whole number of the
/// longest tiles, or these a whole number of shares, tiles of one length leave fewer still.
TANDEM_DEVICE u32 share_of(const ForwardParams& p, const LineLength& line) {
  const u32 all = static_cast<u32>(p.split_ctas);
  const u32 ctas = line.total < enough_blocks * all ? min(all, static_cast<u32>(p.split_few_ctas)) : all;
  const u32 least = max((line.total + ctas - 1) / ctas, static_cast<u32>(p.split_least));
  const u32 shares = line.largest / least;
  const u32 even = shares > 0 ? (line.largest + shares - 1) / shares
                              : (least + line.largest - 1) / line.largest * line.largest;
  return even <= least + least / 16 ? even : least;
}

/// Whether shares end inside tiles. Where all tiles are small beside a share, or short, each goes whole to
/// the CTA in whose share it begins: then no row depends on the tiles before it. So it does where sequences
/// overlap and have more tiles than `combine` has CTAs for.
TANDEM_DEVICE bool cuts_tiles(const ForwardParams& p, const LineLength& line, u32 share) {
  return line.largest > max(share / 16, 4U) && line.tiles <= static_cast<u32>(p.split_items);
}

/// Whether clusters of `ctas` CTAs, which take a whole tile each and share its keys, end no later than shares
/// of the line and their merge. Up to ctas_at_full_rate_of() CTAs read at a rate each, more at the memory's.
template <int ctas, KeySource keys, bool byte_keys>
TANDEM_DEVICE bool takes_clusters(const ForwardParams& p, const LineLength& line) {
  constexpr u32 size = ctas;
  const u32 clusters = static_cast<u32>(p.split_ctas) / size;
  const u32 rounds = (line.tiles + clusters - 1) / clusters;
  const int box_rows = in_pages(keys) ? p.pages.box_rows : 0;
  const u32 reading =
      max(min(line.tiles, clusters) * size, static_cast<u32>(ctas_at_full_rate_of(byte_keys, box_rows)));
  return static_cast<u64>(rounds) * line.largest * reading <=
         static_cast<u64>(line.total + static_cast<u32>(p.split_gain)) * size;
}

/// With a split size: whether there is room for the parts of a tile. Sequences that overlap may have more
/// than there can be otherwise; such a tile goes whole and uncut to the CTA in whose share it begins.
TANDEM_DEVICE bool has_places(const ForwardParams& p, u32 start, u32 cost) {
  return start + cost <= static_cast<u32>(p.split_items);
}

/// The partial result of a CTA whose share ends inside a tile, and of one whose share begins inside one.
TANDEM_DEVICE int part_of_head(u32 cta) {
  return static_cast<int>(2 * cta + 1);
}
TANDEM_DEVICE int part_of_tail(u32 cta) {
  return static_cast<int>(2 * cta);
}
constexpr int whole_tile = -1;
constexpr int tile_of_cluster = -2;  ///< whose CTAs share it, and merge what they have

/// The tiles, whole or in part, of this CTA's share. `by_split`: each item of a tile by itself, whose
/// partial result is its number in the line. `pairs`: its tiles of those that its cluster's share has.
template <Tiling T, KeySource keys, bool by_split = false, bool pairs = false>
struct SplitTiles {
  SplitLine<T, keys, by_split, pairs> line;
  u32 at = 0;
  u32 end = 0;
  bool begun = false;
  bool cuts = true;

  /// Items [skip, skip + count) of the tile's, and its partial result or whole_tile. Of a tile in parts,
  /// `parts` is how many there are up to this one, 0 for the first, of `all`.
  struct Piece {
    int skip;
    int count;
    int part;
    int parts = 0;
    int all = 0;
  };

  /// Finds this CTA's share of the line, whose length is `length`.
  TANDEM_DEVICE void begin(const LineLength& length) {
    const u32 cta = ptx::block_index();
    const u32 share = share_of(line.p, length);
    at = min((pairs ? cta / 2 : cta) * share, length.total);
    end = min(at + share, length.total);
    cuts = cuts_tiles(line.p, length, share);
    begun = true;
  }
  TANDEM_DEVICE bool next(TileIndex& t, Piece& piece) {
    const u32 cta = ptx::block_index();
    if (!begun) begin(line.set_grain());
    u32 start = 0;
    u32 cost = 0;
    bool in_parts = cuts;
    for (;;) {
      if (ptx::warp_uniform(at < end ? 1 : 0) == 0) return false;
      line.locate(at, t, start, cost);
      if constexpr (by_split) in_parts = has_places(line.p, start, cost);
      if (in_parts || at == start) break;
      at = start + cost;  // the CTA before has it
    }
    if constexpr (pairs) t.head += static_cast<int>(cta % 2);
    const u32 stop = !in_parts ? start + cost : by_split ? at + 1 : min(end, start + cost);
    piece.skip = ptx::warp_uniform(static_cast<int>(at - start));
    piece.count = ptx::warp_uniform(static_cast<int>(stop - at));
    const bool whole = at == start && stop == start + cost;
    if constexpr (by_split) {
      piece.part = whole && (!in_parts || line.grain == 1) ? whole_tile : static_cast<int>(at);
    } else {
      piece.part = whole ? whole_tile : at == start ? part_of_head(cta) : part_of_tail(cta);
      // A tile that began before is the first of this CTA's share, which begins at cta * share.
      piece.parts = piece.all = 0;
      if (!pairs && at > start) {
        const u32 share = at / cta;
        piece.parts = static_cast<int>(cta - start / share) + 1;
        piece.all = static_cast<int>((start + cost - 1) / share - start / share) + 1;
      }
    }
    piece.part = ptx::warp_uniform(piece.part);
    at = stop;
    return true;
  }
};

}  // namespace tandem::tile
