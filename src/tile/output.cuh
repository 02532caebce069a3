// The epilogue of the forward kernels: from a warpgroup's accumulators to out and LSE in global memory.
// Every forward kernel ends in Output::store or store_empty, or, where it computes a part of a tile's keys,
// in store_part or store_empty_part: f32 and sums for the kernel `combine`. Where it computes all parts of a
// tile one behind the other, store_merged takes them.
#pragma once

#include "ops/forward/config.hpp"
#include "ptx/eight_bit.cuh"
#include "ptx/memory.cuh"
#include "tile/gate.cuh"
#include "tile/part_merge.cuh"
#include "tile/select.cuh"
#include "tile/softmax.cuh"
#include "tile/walk.cuh"

namespace tandem::tile {

/// An element of out.
template <Tiling T>
using OutElement = typename Select<T.f32_out, float, u16>::type;

/// The first column that an Output writes; 0 where it writes them all.
template <bool all>
struct FirstColumn {
  static constexpr int column = 0;
};
template <>
struct FirstColumn<false> {
  const int column;
};

/// Where a thread has what it keeps of a tile's splits that it has merged.
struct KeptRows {
  ptx::Float4* numbers;  ///< every warp_size-th is the thread's
  i64 level;             ///< to those of the next level of groups
};

/// Writes the 64 rows of one consumer warpgroup, or `columns` of their columns. `invariant`: the Config is.
template <Tiling T, bool invariant = false, int columns = T.head_dim_v>
struct Output : FirstColumn<columns == T.head_dim_v> {
  using FirstColumn<columns == T.head_dim_v>::column;
  static constexpr int outputs = columns / 2;

  const ForwardParams& p;
  const int warpgroup;
  const int thread;  ///< in the warpgroup

  template <bool checked = true, typename Softmax>
  TANDEM_DEVICE void store(const TileIndex& t, float (&o)[outputs], const Softmax& softmax);
  template <bool split>
  TANDEM_DEVICE void store(const TileIndex& t, float (&o)[outputs], const OnlineSoftmax& softmax, int part,
                           const MergePlace& place);
  TANDEM_DEVICE bool stores_vectors() const {
    if constexpr (T.gate) return p.out_vectors && static_cast<const ForwardParamsWithGate&>(p).gate_pairs;
    return p.out_vectors;
  }
  TANDEM_DEVICE void store_words(const TileIndex& t, float (&o)[outputs], const float (&factor)[2],
                                 bool vectors);
  /// Writes a tile, or part `part` of one, whose queries see no key. `split`: tiles may have parts.
  template <bool split>
  TANDEM_DEVICE void store_unseeing(const TileIndex& t, int part) {
    if (split && part != whole_tile) {
      store_empty_part(t, part);
    } else {
      store_empty(t);
    }
  }
  TANDEM_DEVICE void store_empty(const TileIndex& t);
  TANDEM_DEVICE void store_empty_heads(const TileIndex& t);
  TANDEM_DEVICE void store_part(const TileIndex& t, float (&o)[outputs], const OnlineSoftmax& softmax,
                                int part);
  template <bool checked = true, typename Row>
  TANDEM_DEVICE void finish(const TileIndex& t, const Row (&rows)[2], float (&factor)[2]);
  TANDEM_DEVICE void store_empty_part(const TileIndex& t, int part);
  TANDEM_DEVICE void store_sum(int part, int row, const PartSum& sum);
  TANDEM_DEVICE void store_split(const TileIndex& t, float (&o)[outputs], const OnlineSoftmax& softmax,
                                 MergePlace place, int part);
  TANDEM_DEVICE void merge_row(const TileIndex& t, int h, int from, int to, bool opens);
  template <bool alone>
  TANDEM_DEVICE void store_merged(const TileIndex& t, float (&o)[outputs], const OnlineSoftmax& softmax,
                                  const MergePlace& place);
  TANDEM_DEVICE bool merge_kept(KeptRows& kept, MergePlace place);
  TANDEM_DEVICE void load_sums(const KeptRows& kept, PartMerge (&rows)[2]) const {
    const ptx::Float4 sums = ptx::load_global(kept.numbers + outputs / 4 * warp_size);
    rows[0] = PartMerge(sums.x, sums.y);
    rows[1] = PartMerge(sums.z, sums.w);
  }
  TANDEM_DEVICE void store_sums(const KeptRows& kept, const PartMerge (&rows)[2]) const {
    ptx::store_global(kept.numbers + outputs / 4 * warp_size,
                      {rows[0].reference, rows[0].sum, rows[1].reference, rows[1].sum});
  }
  TANDEM_DEVICE i64 part_row(int part, int row) const;
  TANDEM_DEVICE PartSum* sum_of(int part, int row) const;
  TANDEM_DEVICE void store_columns(u16* at, int left, const ptx::Vec4& words, bool vectors);
  TANDEM_DEVICE void store_columns(float* at, int left, const u32 (&words)[8], bool vectors);
  TANDEM_DEVICE void store_floats(float* at, int left, const float (&o)[outputs], int first, float factor,
                                  bool empty, bool vectors);
  TANDEM_DEVICE void store_zeros(OutElement<T>* at, int left);
  TANDEM_DEVICE OutElement<T>* out_row(const TileIndex& t, int query, int head) const;
  /// Query and query head of row `row` of the warpgroup.
  TANDEM_DEVICE TileRow row_of(const TileIndex& t, int row) const {
    return row_at<T>(p, t, first_query<T>(p, t.m, warpgroup), row);
  }
  TANDEM_DEVICE int query_of(const TileIndex& t, int row) const { return row_of(t, row).query; }
  /// How many rows, from the first on, are of queries before `end`, with those that are none.
  TANDEM_DEVICE int rows_until(const TileIndex& t, int end) const {
    return min(queries_of_unit<T>(p), end - first_query<T>(p, t.m, warpgroup)) *
           (T.heads_as_rows ? p.row_heads : 1);
  }
  TANDEM_DEVICE void store_lse(const TileIndex& t, int query, int head, float value,
                               float largest_logit = -ptx::infinity());
};

template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE OutElement<T>* Output<T, invariant, columns>::out_row(const TileIndex& t, int query,
                                                                    int head) const {
  const int batch = p.packed_q ? 0 : t.batch;
  const i64 row = t.begin_q + static_cast<i64>(query);
  return static_cast<OutElement<T>*>(p.out) + batch * p.out_stride.batch + head * p.out_stride.head +
         row * p.out_stride.row;
}

/// `value` is -inf for a query that sees no key. With a sink its LSE is the sink's logit. `largest_logit`
/// (logarithm to base 2) is NaN where the LSE is.
template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE void Output<T, invariant, columns>::store_lse(const TileIndex& t, int query, int head,
                                                            float value, float largest_logit) {
  if constexpr (T.max_logits) {
    const auto& to = static_cast<const ForwardParamsWithMaxima&>(p);
    const Strides& stride = to.max_logits_stride;
    const i64 row = t.begin_q + static_cast<i64>(query);
    float* at =
        to.max_logits + (p.packed_q ? 0 : t.batch) * stride.batch + head * stride.head + row * stride.row;
    ptx::store_global(at, value == value ? largest_logit * ln_2 : value);
  }
  if (p.lse == nullptr) return;
  if (value == -ptx::infinity() && p.sink != nullptr && query < t.seqlen_q) {
    value = ptx::load_global(p.sink + head * p.sink_stride);
  }
  const int batch = p.packed_q ? 0 : t.batch;
  const i64 row = t.begin_q + static_cast<i64>(query);
  float* lse = p.lse + batch * p.lse_stride.batch + head * p.lse_stride.head + row * p.lse_stride.row;
  ptx::store_global(lse, value);
}

/// Eight columns of a row, from `at` on, of which `left` exist. `vectors`: p.out_vectors, known to the
/// compiler where code must not branch.
template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE void Output<T, invariant, columns>::store_columns(u16* at, int left, const ptx::Vec4& words,
                                                                bool vectors) {
  if (vectors) {
    if (left > 0) ptx::store_global(reinterpret_cast<ptx::Vec4*>(at), words);
    return;
  }
  const u32 each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < left) ptx::store_global(at + i, static_cast<u16>(each[i / 2] >> (16 * (i % 2))));
  }
}

/// Eight columns of f32: two 16-byte stores.
template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE void Output<T, invariant, columns>::store_columns(float* at, int left, const u32 (&words)[8],
                                                                bool vectors) {
  if (vectors) {
    if (left <= 0) return;
    ptx::store_global(reinterpret_cast<ptx::Vec4*>(at), ptx::Vec4{words[0], words[1], words[2], words[3]});
    ptx::store_global(reinterpret_cast<ptx::Vec4*>(at) + 1,
                      ptx::Vec4{words[4], words[5], words[6], words[7]});
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < left) ptx::store_global(at + i, ptx::float_of(words[i]));
  }
}

template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE void Output<T, invariant, columns>::store_zeros(OutElement<T>* at, int left) {
  if constexpr (T.f32_out) {
    store_columns(at, left, {0, 0, 0, 0, 0, 0, 0, 0}, p.out_vectors);
  } else {
    store_columns(at, left, {0, 0, 0, 0}, p.out_vectors);
  }
}

/// Writes the LSE and the largest logit of the thread's two rows, and finds what their O is multiplied by.
template <Tiling T, bool invariant, int columns>
template <bool checked, typename Row>
TANDEM_DEVICE void Output<T, invariant, columns>::finish(const TileIndex& t, const Row (&rows)[2],
                                                         float (&factor)[2]) {
  const FragmentPosition position(thread);
  const bool has_sink = p.sink != nullptr;
  const auto sink_of = [&](int head) {
    return has_sink ? ptx::load_global(p.sink + head * p.sink_stride) : 0.0F;
  };
  const float of_tile = T.heads_as_rows ? 0.0F : sink_of(t.head);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const auto [query, head] = row_of(t, position.row(h));
    const float sink = T.heads_as_rows ? sink_of(head) : of_tile;
    float lse = rows[h].template finish<checked>(has_sink, sink * log2_e, factor[h]);
    float largest = largest_logit(rows[h]);
    if (query >= t.seqlen_q) {  // past the end: whatever was computed there is no result
      factor[h] = 0.0F;
      lse = largest = -ptx::infinity();
    }
    if (column == 0 && query < t.end_q && thread % 4 == 0) store_lse(t, query, head, lse, largest);
  }
}

/// Normalises O, gates it and writes it with the LSE. The four lanes of a quad exchange words so that each
/// stores 16 bytes of a row and the quad 64 in a run: no shared memory, so the next tile's loads need not
/// wait for this store.
template <Tiling T, bool invariant, int columns>
template <bool checked, typename Softmax>
TANDEM_DEVICE void Output<T, invariant, columns>::store(const TileIndex& t, float (&o)[outputs],
                                                        const Softmax& softmax) {
  ptx::trace(TraceEvent::stores);
  const decltype(sum_of_row(softmax, 0)) rows[2] = {sum_of_row(softmax, 0), sum_of_row(softmax, 1)};
  float factor[2];
  finish<checked>(t, rows, factor);
  // Rows without a result may hold NaN. To select at each word would cost as much as packing does.
  if (ptx::any_lane(factor[0] == 0.0F || factor[1] == 0.0F)) {
#pragma unroll
    for (int i = 0; i < outputs; ++i) {
      if (factor[i / 2 % 2] == 0.0F) o[i] = 0.0F;
    }
  }
  if (stores_vectors()) {  // tested once: with a branch at each store, shuffles and stores would not overlap
    store_words(t, o, factor, true);
  } else {
    store_words(t, o, factor, false);
  }
}

/// Eight columns of a row in f32, of which a quad's lanes hold two each of every eight from accumulator
/// `first` on, times `factor`; zeros if `empty`, whatever they hold.
template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE void Output<T, invariant, columns>::store_floats(float* at, int left, const float (&o)[outputs],
                                                               int first, float factor, bool empty,
                                                               bool vectors) {
  u32 even[4];
  u32 odd[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    even[j] = empty ? 0U : ptx::bits_of(o[first + 4 * j] * factor);
    odd[j] = empty ? 0U : ptx::bits_of(o[first + 4 * j + 1] * factor);
  }
  transpose_quad(even, thread % 4);
  transpose_quad(odd, thread % 4);
  store_columns(at, left, {even[0], odd[0], even[1], odd[1], even[2], odd[2], even[3], odd[3]}, vectors);
}

template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE void Output<T, invariant, columns>::store_words(const TileIndex& t, float (&o)[outputs],
                                                              const float (&factor)[2], bool vectors) {
  const int quad_lane = thread % 4;
  const FragmentPosition position(thread);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const auto [query, head] = row_of(t, position.row(h));
    const int first_col = column + 8 * quad_lane;
    auto* const first = out_row(t, query, head) + first_col;
    const int left = query < t.end_q ? p.head_dim_v - first_col : 0;
#pragma unroll
    for (int g = 0; g < columns / 32; ++g) {
      if constexpr (T.gate) {
        const int col = column + 32 * g + position.first_col;
        const u16* const gate = gate_row(p, t, query, head) + col;
        const int gates = factor[h] != 0.0F ? p.head_dim_v - col : 0;
        constexpr int together = gated_groups<columns>;
        if (!vectors) {
          multiply_by_gates<T.element, 1>(o, 16 * g + 2 * h, gate, gates, false);
        } else if (g % together == 0) {
          multiply_by_gates<T.element, together>(o, 16 * g + 2 * h, gate, gates, true);
        }
      }
      if constexpr (T.f32_out) {
        store_floats(first + 32 * g, left - 32 * g, o, 16 * g + 2 * h, factor[h], false, vectors);
      } else {
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = 4 * (4 * g + j) + 2 * h;
          words[j] = pack<T.element>(o[i] * factor[h], o[i + 1] * factor[h]);
        }
        transpose_quad(words, quad_lane);
        store_columns(first + 32 * g, left - 32 * g, {words[0], words[1], words[2], words[3]}, vectors);
      }
    }
  }
}

/// Writes a tile whose queries see no key: out 0, LSE -inf, or the sink as store_lse has it.
template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE void Output<T, invariant, columns>::store_empty(const TileIndex& t) {
  if constexpr (T.heads_as_rows) return store_empty_heads(t);
  const int first = t.m * T.block_m + warpgroup * 64;
  const int rows = min(64, t.end_q - first);
  constexpr int vectors = T.head_dim_v / 8;
  // One thread writes each row's LSE. Inside the loop below, and with rows found as heads as rows are,
  // kernels of 256 columns have 150 bytes of local memory (NVRTC 13.0).
  if (thread < rows) store_lse(t, first + thread, t.head, -ptx::infinity());
  for (int i = thread; i < rows * vectors; i += warpgroup_size) {
    const int query = first + i / vectors;
    const int col = i % vectors * 8;
    store_zeros(out_row(t, query, t.head) + col, p.head_dim_v - col);
  }
}

/// Writes such a tile of heads as rows, of which some may be none.
template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE void Output<T, invariant, columns>::store_empty_heads(const TileIndex& t) {
  constexpr int vectors = T.head_dim_v / 8;
  for (int i = thread; i < rows_until(t, t.end_q) * vectors; i += warpgroup_size) {
    const auto [query, head] = row_of(t, i / vectors);
    const int col = i % vectors * 8;
    if (query >= t.end_q) continue;
    if (col == 0) store_lse(t, query, head, -ptx::infinity());
    store_zeros(out_row(t, query, head) + col, p.head_dim_v - col);
  }
}

/// Where row `row` of a partial result lies.
template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE i64 Output<T, invariant, columns>::part_row(int part, int row) const {
  return static_cast<i64>(part) * (invariant ? p.part_rows : T.block_m) + row;
}

/// Where a row's sum is, with a split size. Of a place of the CTA's own each warpgroup that has columns of O
/// has a copy, since it does not wait for the others.
template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE PartSum* Output<T, invariant, columns>::sum_of(int part, int row) const {
  constexpr int copies = T.head_dim_v / columns;
  if (copies > 1 && part >= p.split_items)
    part = p.split_items + (part - p.split_items) * copies + column / columns;
  return p.part_sums + part_row(part, row);
}

/// Writes the sum of a row of a part. The first columns' warpgroup does, if the place is not its own.
template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE void Output<T, invariant, columns>::store_sum(int part, int row, const PartSum& sum) {
  if (column == 0 || part >= p.split_items) ptx::store_global<PartSum>(sum_of(part, row), sum);
}

/// Writes O of a part of the keys and the sums of its rows, without the sink.
template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE void Output<T, invariant, columns>::store_part(const TileIndex& t, float (&o)[outputs],
                                                             const OnlineSoftmax& softmax, int part) {
  const int quad_lane = thread % 4;
  const FragmentPosition position(thread);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warpgroup * 64 + position.row(h);
    const RowSum own = sum_of_row(softmax, h);
    const bool empty = own.has_seen_nothing();  // O is then 0, whatever a NaN in V has made of it
    // A product, since of accumulators that are stored as they are ptxas (NVRTC 13.0) serialises the products
    // in kernels that convert keys.
    float factor[1] = {empty ? 0.0F : 1.0F};
    ptx::pin_registers(factor);
    const bool used = query_of(t, position.row(h)) < t.seqlen_q;
    const i64 at = part_row(part, row);
    if constexpr (invariant) {
      if (used && quad_lane == 0) store_sum(part, row, own);
    } else {
      if (column == 0 && used && quad_lane == 0) ptx::store_global<PartSum>(p.part_sums + at, own);
    }
    float* const out = p.part_out + at * T.head_dim_v + column + 8 * quad_lane;
#pragma unroll
    for (int g = 0; g < columns / 32; ++g) {
      store_floats(out + 32 * g, used ? 8 : 0, o, 16 * g + 2 * h, factor[0], empty, true);
    }
  }
}

/// Writes a part of the keys of which no query of the tile sees any: no sum, and an O of 0.
template <Tiling T, bool invariant, int columns>
TANDEM_DEVICE void Output<T, invariant, columns>::store_empty_part(const TileIndex& t, int part) {
  const int rows = rows_until(t, t.seqlen_q);
  const i64 at = part_row(part, warpgroup * 64);
  if (thread < rows) ptx::store_global<PartSum>(p.part_sums + at + thread, PartMerge());
  auto* const words = reinterpret_cast<ptx::Vec4*>(p.part_out + at * T.head_dim_v);
  for (int i = thread; i < rows * (T.head_dim_v / 4); i += warpgroup_size) {
    ptx::store_global(words + i, ptx::Vec4{0, 0, 0, 0});
  }
}

}  // namespace tandem::tile
