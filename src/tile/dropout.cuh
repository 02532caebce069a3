// Dropout: which entries of P are kept, by Philox4x32-10 (Salmon et al. 2011) on the entry's position
// alone, as problem/dropout.hpp has it. One call decides four neighbouring keys of a query. Lanes that hold
// entries of the same four share the calls, and pass each other the bits.
#pragma once

#include "ops/functions/config.hpp"
#include "ptx/warp.cuh"

namespace tandem::tile {

/// Keys 4 * quad to 4 * quad + 3 of a query that are kept, a bit each. `entry` counts heads of all batch
/// entries.
TANDEM_DEVICE u32 kept_keys(const DropoutParams& d, u32 quad, u32 query, u32 entry) {
  u32 c0 = quad;
  u32 c1 = query;
  u32 c2 = entry;
  u32 c3 = d.offset;
  u32 k0 = d.key[0];
  u32 k1 = d.key[1];
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 first = static_cast<u64>(c0) * 0xD2511F53U;
    const u64 second = static_cast<u64>(c2) * 0xCD9E8D57U;
    c0 = static_cast<u32>(second >> 32) ^ c1 ^ k0;
    c2 = static_cast<u32>(first >> 32) ^ c3 ^ k1;
    c1 = static_cast<u32>(second);
    c3 = static_cast<u32>(first);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return (c0 >= d.threshold ? 1U : 0U) | (c1 >= d.threshold ? 2U : 0U) | (c2 >= d.threshold ? 4U : 0U) |
         (c3 >= d.threshold ? 8U : 0U);
}

/// Where a batch entry's heads, queries and keys are among the whole: they are the whole.
template <bool placed>
struct DropoutPlaces {
  u32 first_head = 0;

  DropoutPlaces() = default;
  TANDEM_DEVICE DropoutPlaces(const DropoutParams& d, int batch)
      : first_head(static_cast<u32>(batch) * d.heads) {}
  TANDEM_DEVICE u32 query_at(int query) const { return static_cast<u32>(query); }
  TANDEM_DEVICE u32 kept(const DropoutParams& d, u32 quad, u32 query, u32 entry) const {
    return kept_keys(d, quad, query, entry);
  }
};
/// They are rows of one sequence, at equal distances.
template <>
struct DropoutPlaces<true> {
  u32 first_head = 0;
  u32 query = 0;
  u32 key = 0;
  u32 step = 1;

  DropoutPlaces() = default;
  TANDEM_DEVICE DropoutPlaces(const DropoutParams& d, int batch) {
    const int* const place = d.places + batch * d.place_stride;
    first_head = static_cast<u32>(ptx::load_global(place));
    query = static_cast<u32>(ptx::load_global(place + 1));
    key = static_cast<u32>(ptx::load_global(place + 2));
    step = static_cast<u32>(ptx::load_global(place + 3));
  }
  TANDEM_DEVICE u32 query_at(int i) const { return query + step * static_cast<u32>(i); }
  /// Four keys of the call. They are four neighbours of the whole where `key` is a multiple of 4
  /// and the step is 1, for one call then as well; the branch is the same for all lanes.
  TANDEM_DEVICE u32 kept(const DropoutParams& d, u32 quad, u32 query_of_all, u32 entry) const {
    u32 kept = 0;
    u32 four = 0;
    u32 last = 0xffffffffU;  // beyond any place / 4
#pragma unroll 1
    for (u32 e = 0; e < 4; ++e) {
      const u32 at = key + step * (4 * quad + e);
      if (at / 4 != last) {
        last = at / 4;
        four = kept_keys(d, last, query_of_all, entry);
      }
      kept |= (four >> at % 4 & 1U) << e;
    }
    return kept;
  }
};

/// Forward: what a thread keeps for the time of a tile. Two neighbouring lanes hold the same four keys of
/// the same two rows: each decides one of the rows. Nothing without dropout.
template <bool on, bool placed>
struct DroppedRows {
  u32 dropped_query = 0;  ///< that of the row that this lane decides
  u32 dropped_entry = 0;
  DropoutPlaces<placed> dropout_at;

  static TANDEM_DEVICE int odd() { return static_cast<int>(ptx::thread_index()) % 2; }
  TANDEM_DEVICE void set_dropped(const DropoutParams& d, int batch, int head, int query) {
    dropout_at = DropoutPlaces<placed>(d, batch);
    dropped_query = dropout_at.query_at(query);
    dropped_entry = dropout_at.first_head + static_cast<u32>(head);
  }
  /// Clears the exponentials that are not kept, once they are in the softmax's sum. `key` is the thread's
  /// first one. All lanes of a warp call.
  template <int n, typename Params>
  TANDEM_DEVICE void drop(float (&s)[n], int key, const Params& p) const {
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
      const u32 own = dropout_at.kept(p.functions.dropout, static_cast<u32>(key + 8 * j) / 4, dropped_query,
                                      dropped_entry);
      const u32 other = ptx::shuffle_xor(own, 1);
      const u32 rows[2] = {odd() == 0 ? own : other, odd() == 0 ? other : own};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if ((rows[h] >> (2 * odd() + e) & 1U) == 0) s[4 * j + 2 * h + e] = 0.0F;
        }
      }
    }
  }
  /// The kept exponentials are scaled with O.
  template <int n, typename Params>
  TANDEM_DEVICE void scale_kept(float (&o)[n], const Params& p) const {
#pragma unroll
    for (float& x : o) x *= p.functions.dropout.scale;
  }
};
template <bool placed>
struct DroppedRows<false, placed> {
  template <int n, typename Params>
  TANDEM_DEVICE void drop(float (&/*s*/)[n], int /*key*/, const Params& /*p*/) const {}
  template <int n, typename Params>
  TANDEM_DEVICE void scale_kept(float (&/*o*/)[n], const Params& /*p*/) const {}
};

/// Backward: the entries of a query block that a thread holds of the transposed scores, a bit each in their
/// order. Four lanes hold the same four keys twice, of the same two queries: each decides one of these
/// four. `query` is the thread's first one, `key` the first of its group of eight keys, and `row` its key
/// among them. All lanes of a warp call.
template <int scores, bool placed>
TANDEM_DEVICE u32 kept_scores(const DropoutParams& d, int query, int key, int row, int batch, int head) {
  static_assert(scores <= 32);
  const int decided = row % 4;  // query decided % 2, of the keys that begin 8 * (decided / 2) further
  const u32 quad = static_cast<u32>(key + 8 * (decided / 2) + row / 4 * 4) / 4;
  const DropoutPlaces<placed> places(d, batch);
  const u32 entry = places.first_head + static_cast<u32>(head);
  u32 kept = 0;
#pragma unroll 2
  for (int j = 0; j < scores / 4; ++j) {
    u32 all = places.kept(d, quad, places.query_at(query + 8 * j + decided % 2), entry) << (4 * decided);
    all |= ptx::shuffle_xor(all, 4);
    all |= ptx::shuffle_xor(all, 8);
    // Bits 0, 4, 8 and 12 side by side: the product has each of them once at 9 to 12, and no carry reaches
    // it.
    kept |= ((all >> row % 4 & 0x1111U) * 0x249U >> 9 & 15U) << (4 * j);
  }
  return kept;
}

}  // namespace tandem::tile
