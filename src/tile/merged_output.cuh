// The ends of splits that a CTA computes one by one (tile/part_merge.cuh), and what it keeps in part_out of
// those that it has merged, on each level of groups.
#pragma once

#include "tile/output.cuh"

namespace tandem::tile {

/// Merges `count` vectors, of which each is `step` behind the one before, with those at `to`, or with none if
/// it `opens`. Weights are of the first two and the last two numbers of each.
TANDEM_DEVICE void merge_vectors(const ptx::Float4* from, ptx::Float4* to, int step, int count, bool opens,
                                 const PartMerge::Weights& first, const PartMerge::Weights& last) {
#pragma unroll 4
  for (int v = 0; v < count; ++v) {
    const ptx::Float4 part = ptx::load_global(from + v * step);
    ptx::Float4 before{0.0F, 0.0F, 0.0F, 0.0F};
    if (!opens) before = ptx::load_global(to + v * step);
    ptx::store_global(to + v * step, PartMerge::add(before, part, first, last));
  }
}

/// Ends a tile, part `part` of one, or its split at `place`. `split`: tiles may have parts.
template <Tiling T, bool invariant, int columns>
template <bool split>
TANDEM_DEVICE void Output<T, invariant, columns>::store(const TileIndex& t, float (&o)[outputs],
                                                        const OnlineSoftmax& softmax, int part,
                                                        const MergePlace& place) {
  if (split && part != whole_tile) {
    if constexpr (invariant) return store_split(t, o, softmax, place, part);
    store_part(t, o, softmax, part);
  } else if constexpr (invariant) {
    store_merged<split>(t, o, softmax, place);
  } else {
    store(t, o, softmax);
  }
}

// ---- Where CTAs share the splits of a tile ----

/// Merges a split with others of its part. Splits, and levels of groups but the last, have places for each
/// CTA behind those of parts; what a thread reads there it has written.
template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE void Output<T, invariant, columns>::store_split(const TileIndex& t, float (&o)[outputs],
                                                              const OnlineSoftmax& softmax, MergePlace place,
                                                              int part) {
  const bool alone = place.first == place.last;
  const int kept = p.split_items + static_cast<int>(ptx::block_index());
  store_part(t, o, softmax, alone ? part : kept);
  if (alone) return;
  const int ctas = static_cast<int>(ptx::grid_size());
  for (int from = kept, to = 0;; from = to) {
    const MergePlace group = place.group();
    const bool all = group.first == group.last;
    to = all ? part : from + ctas;
    merge_row(t, 0, from, to, place.opens());
    merge_row(t, 1, from, to, place.opens());
    if (all || !place.closes()) return;
    place = group;
  }
}

/// Merges row `h` of the thread's two of part `from` with that of part `to`, or with nothing.
template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE void Output<T, invariant, columns>::merge_row(const TileIndex& t, int h, int from, int to,
                                                            bool opens) {
  const FragmentPosition position(thread);
  const int row = warpgroup * 64 + position.row(h);
  const bool used = query_of(t, position.row(h)) < t.seqlen_q;
  // The first thread of four has written the row's sum.
  const auto sum_at = [&](int part) {
    PartMerge sum;
    if (used && thread % 4 == 0) sum = load_sum(sum_of(part, row));
    const int writer = thread % warp_size / 4 * 4;
    return PartMerge(ptx::shuffle(sum.reference, writer), ptx::shuffle(sum.sum, writer));
  };
  PartMerge merged;
  if (!opens) merged = sum_at(to);
  const PartMerge::Weights weights = merged.take(sum_at(from));
  if (!used) return;
  if (thread % 4 == 0) store_sum(to, row, merged);
  const auto at = [&](int part) {
    return reinterpret_cast<ptx::Float4*>(p.part_out + part_row(part, row) * T.head_dim_v + column) +
           2 * (thread % 4);
  };
  for (int i = 0; i < 2; ++i)
    merge_vectors(at(from) + i, at(to) + i, 8, columns / 32, opens, weights, weights);
}

// ---- Where a CTA computes all splits of a tile ----

/// Merges what `kept` has of a group with the rest of the next larger one, and so on as long as these end.
/// False if more is to come; else `kept` has all.
template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE bool Output<T, invariant, columns>::merge_kept(KeptRows& kept, MergePlace place) {
  for (;;) {
    const KeptRows from = kept;
    kept.numbers += kept.level;
    PartMerge part[2];
    PartMerge rows[2];
    load_sums(from, part);
    if (!place.opens()) load_sums(kept, rows);
    PartMerge::Weights weights[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) weights[h] = rows[h].take(part[h]);
    merge_vectors(from.numbers, kept.numbers, warp_size, outputs / 4, place.opens(), weights[0], weights[1]);
    store_sums(kept, rows);
    if (!place.closes()) return false;
    place = place.group();
    if (place.first == place.last) return true;
  }
}

/// Merges a split of a tile with those behind it, and after the first one writes the result. `alone`: a tile
/// has no other.
template <Tiling T, bool invariant, int columns>
template <bool alone>
TANDEM_DEVICE void Output<T, invariant, columns>::store_merged(const TileIndex& t, float (&o)[outputs],
                                                               const OnlineSoftmax& softmax,
                                                               const MergePlace& place) {
  constexpr int vectors = outputs / 4;
  constexpr int parts = T.head_dim_v / columns;
  constexpr i64 room = merged_numbers(T, parts);
  const int warp = (warpgroup * 4 + thread / warp_size) * parts + column / columns;
  KeptRows kept{reinterpret_cast<ptx::Float4*>(p.part_out + room * ptx::block_index()) +
                    room / 4 / (T.block_m / 16 * parts) * warp + thread % warp_size,
                room / 4 * ptx::grid_size()};
  const bool opens = alone || place.opens();
  PartMerge rows[2];
  if (!opens) load_sums(kept, rows);
  bool empty[2];
  PartMerge::Weights weights[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const RowSum own = sum_of_row(softmax, h);
    empty[h] = own.has_seen_nothing();
    weights[h] = rows[h].take(own);
  }
  const MergePlace group = place.group();
  const bool closes = alone || place.closes();
  const bool ends = alone || (closes && group.first == group.last);
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    ptx::Float4 before{0.0F, 0.0F, 0.0F, 0.0F};
    if (!opens) before = ptx::load_global(kept.numbers + v * warp_size);
    float(&each)[4] = reinterpret_cast<float(&)[4]>(o[4 * v]);
    // A row that sees none of the keys has an O of 0, whatever a NaN in V has made of it.
    const auto part = [&](int i) { return empty[i / 2] ? 0.0F : each[i]; };
    each[0] = PartMerge::add(before.x, part(0), weights[0]);
    each[1] = PartMerge::add(before.y, part(1), weights[0]);
    each[2] = PartMerge::add(before.z, part(2), weights[1]);
    each[3] = PartMerge::add(before.w, part(3), weights[1]);
    if (!ends) ptx::store_global(kept.numbers + v * warp_size, {each[0], each[1], each[2], each[3]});
  }
  if (!ends) {
    store_sums(kept, rows);
    if (!closes || !merge_kept(kept, group)) return;
    load_sums(kept, rows);
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      reinterpret_cast<ptx::Float4&>(o[4 * v]) = ptx::load_global(kept.numbers + v * warp_size);
    }
  }
  float factor[2];
  finish(t, rows, factor);
#pragma unroll
  for (int i = 0; i < outputs; ++i) {
    if (factor[i / 2 % 2] == 0.0F) o[i] = 0.0F;
  }
  store_words(t, o, factor, stores_vectors());
}

}  // namespace tandem::tile
