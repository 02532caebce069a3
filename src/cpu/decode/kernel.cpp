// Few query rows against many keys, as in decoding: lanes would be mostly empty, so dot products run along
// head_dim (products.hpp).
//
// Keys are cut into splits whose size depends on the sequence alone; each leaves a partial result (maximum,
// sum, unnormalised O) and partial results are folded in order, whether one thread computed them or many. P
// stays in fp32. Partial results are in f64: a split adds a run of run_keys keys in f32, block by block, and
// its runs in f64 (forward/lane_totals.hpp says why).
//
// Neighbouring KV heads are attended to side by side: a block of keys of one head, then of the next. Where
// heads of a key follow one another in memory, memory is then read from front to back. One head at a time it
// is read in pieces of a row, at a third of the speed. No bit depends on it.
//
// Compiled once for each instruction set (targets/targets.cmake).

#include "cpu/decode/products.hpp"
#include "cpu/decode/scratch.hpp"
#include "cpu/decode/sums.hpp"
#include "cpu/decode/tiles.hpp"
#include "cpu/forward/one_key.hpp"
#include "cpu/simd/stage.hpp"

namespace tandem::cpu::TANDEM_TARGET {
namespace {

/// Rows of the next block fetched for each group of scores; products with V fetch one for each key.
constexpr int rows_ahead = 3;

/// The most columns of a row of q.
constexpr int most_columns = sizeof zero_row / sizeof(float);

/// What one KV head has of its own.
template <typename Query>
struct Head {
  const ForwardTile* tile;
  Query* q;
  std::int64_t k_offset;  ///< from the first head's rows
  std::int64_t v_offset;
  Logits logits;
  RunSums sums;
  float* tiles;  ///< O where it is in tiles, instead of sums.out
};

/// The keys that the rows see, which all heads have alike.
struct SeenKeys {
  RowKeys rows[short_rows];
  std::int64_t all_begin;  ///< keys [all_begin, all_end) are seen by every row
  std::int64_t all_end;
};

SeenKeys seen_keys(const ForwardTile& t) {
  SeenKeys seen{.rows = {}, .all_begin = 0, .all_end = t.seqlen_k};
  for (int r = 0; r < t.count; ++r) {
    const RowKeys keys = row_keys(t, (t.first + r) / t.group);
    seen.rows[r] = keys;
    if (keys.begin > seen.all_begin) seen.all_begin = keys.begin;
    if (keys.end < seen.all_end) seen.all_end = keys.end;
  }
  return seen;
}

TANDEM_INLINE void hide_keys(const RowKeys& keys, std::int64_t begin, int count, float* s) {
  for (int i = 0; i < count && begin + i < keys.begin; ++i) s[i] = negative_infinity;
  for (int i = count; i > 0 && begin + i > keys.end; --i) s[i - 1] = negative_infinity;
}

/// Scales by row of a block's keys, of one head; null: none. Up to whole registers they are 1.
struct BlockScales {
  alignas(64) float of_k[short_block];
  alignas(64) float of_v[short_block];
  const float* k = nullptr;
  const float* v = nullptr;

  BlockScales(const ForwardTile& t, std::int64_t begin, int count) {
    k = take(t, t.k_scales, begin, count, of_k);
    v = take(t, t.v_scales, begin, count, of_v);
  }

 private:
  static const float* take(const ForwardTile& t, const TileScales& scales, std::int64_t begin, int count,
                           float* to) {
    if (scales.data == nullptr) return nullptr;
    gather_scales(t, scales, begin, count, to);
    for (int j = count; j < padded(count); ++j) to[j] = 1.0F;
    return to;
  }
};

TANDEM_INLINE void multiply_row(float* s, int count, const float* scales) {
  for (int j = 0; j < count; j += vec_lanes) store(hn::Mul(load(s + j), load(scales + j)), s + j);
}

/// Row `row`'s weights of a block: scores are scaled, transformed and hidden as they are to be.
template <typename Query, typename Rescale>
TANDEM_INLINE void soften_block(const Head<Query>& head, int row, std::int64_t begin, int count, float* s,
                                const BlockScales& scales, const SeenKeys& seen, const Rescale& rescale) {
  if (scales.k != nullptr) multiply_row(s, count, scales.k);
  if (head.logits.transforms()) transform_row(s, count, head.logits);
  if (begin < seen.all_begin || begin + count > seen.all_end) hide_keys(seen.rows[row], begin, count, s);
  soften_row(s, count, head.logits.factor, head.sums, row, rescale);
  if (scales.v != nullptr) multiply_row(s, count, scales.v);
}

/// `rows` rows of a head from `first` against a block of keys that starts at `begin`.
template <typename Scores, int rows, typename K>
[[gnu::noinline]] void attend_block(const Head<typename Scores::Query>& head, int first, std::int64_t begin,
                                    const BlockRows<K>& block, const BlockScales& scales,
                                    const SeenKeys& seen, RowsAhead<K>& ahead) {
  const ForwardTile& t = *head.tile;
  alignas(64) float scores[rows * short_block];
  const auto* q = head.q + static_cast<std::int64_t>(first) * query_stride<Scores>(t.head_dim_qk);
  for (int j = 0; j < block.count; j += keys_together) {
    ahead.fetch(rows_ahead);
    score_keys<Scores, rows>(block.k + j, head.k_offset, q, t.head_dim_qk, scores + j);
  }
  for (int r = 0; r < rows; ++r) {
    float* const out = head.sums.out + static_cast<std::int64_t>(first + r) * t.head_dim_v;
    soften_block(head, first + r, begin, block.count, scores + r * short_block, scales, seen,
                 [&](float alpha) {
                   for (int c = 0; c < t.head_dim_v; ++c) out[c] *= alpha;
                 });
  }
  weigh<Scores, rows>(block.v, head.v_offset, block.count, scores,
                      head.sums.out + static_cast<std::int64_t>(first) * t.head_dim_v, t.head_dim_v, ahead);
}

/// All rows of a head against a block of keys.
template <typename Scores, typename K>
requires(!on_tiles<Scores>) TANDEM_INLINE
    void attend_rows(const Head<typename Scores::Query>& head, std::int64_t begin, const BlockRows<K>& block,
                     const BlockScales& scales, const SeenKeys& seen, RoomOf<Scores>&, bool,
                     RowsAhead<K>& ahead) {
  const int count = head.tile->count;
  int r = 0;
  for (; r + rows_together <= count; r += rows_together) {
    attend_block<Scores, rows_together>(head, r, begin, block, scales, seen, ahead);
  }
  switch (count - r) {
    case 1: attend_block<Scores, 1>(head, r, begin, block, scales, seen, ahead); break;
    case 2: attend_block<Scores, 2>(head, r, begin, block, scales, seen, ahead); break;
    case 3: attend_block<Scores, 3>(head, r, begin, block, scales, seen, ahead); break;
    default: break;
  }
}

#if defined(TANDEM_MATRIX_UNIT)
/// All rows of a head against a block of keys, on the matrix unit.
template <typename Scores, typename K>
requires on_tiles<Scores>
[[gnu::noinline]] void attend_rows(const Head<typename Scores::Query>& head, std::int64_t begin,
                                   const BlockRows<K>& block, const BlockScales& scales, const SeenKeys& seen,
                                   RoomOf<Scores>& room, bool fresh, RowsAhead<K>& ahead) {
  const ForwardTile& t = *head.tile;
  // Rows of the next block that every product with K fetches, and every pair of keys of V.
  const int products = 4 * ((t.head_dim_qk + Scores::columns - 1) / Scores::columns);
  const int pairs = short_block / 2 * ((t.head_dim_v + value_columns - 1) / value_columns);
  score_on_tiles(block.k, head.k_offset, t.head_dim_qk, head.q, room, (short_block + products - 1) / products,
                 ahead);
  const int whole = (block.count + 31) / 32 * 32;
  for (int r = 0; r < t.count; ++r) {
    if (r % 4 == 0) turn_rows(room, r);
    float* const s = room.scores + r * short_block;
    soften_block(head, r, begin, block.count, s, scales, seen, [&](float alpha) {
      if (!fresh) scale_tile_row(head.tiles, t.head_dim_v, r, alpha);
    });
    for (int j = padded(block.count); j < whole; j += vec_lanes) store(zero(), s + j);
    place_weights(s, whole, r, room);
  }
  weigh_on_tiles(block.v, head.v_offset, whole, room, fresh, head.tiles, t.head_dim_v,
                 (short_block + pairs - 1) / pairs, ahead);
}
#endif

/// A head against a block of keys.
template <typename Scores, typename K>
TANDEM_INLINE void attend_head(const Head<typename Scores::Query>& head, std::int64_t begin,
                               const BlockRows<K>& rows, const SeenKeys& seen, RoomOf<Scores>& room,
                               bool fresh, RowsAhead<K>& ahead) {
  const BlockScales scales(*head.tile, begin, rows.count);
  if (!rows.missing) return attend_rows<Scores>(head, begin, rows, scales, seen, room, fresh, ahead);
  BlockRows<K> of_head = rows;
  of_head.keep_missing(head.k_offset, head.v_offset);
  attend_rows<Scores>(head, begin, of_head, scales, seen, room, fresh, ahead);
}

/// Begins a run of keys. The first block of a run writes O in tiles, which is not cleared.
template <typename Scores>
TANDEM_INLINE void open_run(const Head<typename Scores::Query>& head) {
  clear(head.sums, head.tile->count, on_tiles<Scores> ? 0 : head.tile->head_dim_v);
}

template <typename Scores, typename T>
Head<typename Scores::Query> open_head(const ForwardTile& t, const ForwardTile& first_tile,
                                       std::int64_t key_bytes) {
  const DecodeScratch layout = decode_scratch(t.head_dim_qk, t.head_dim_v);
  Head<typename Scores::Query> head{
      .tile = &t,
      .q = reinterpret_cast<typename Scores::Query*>(t.scratch +
                                                     (on_tiles<Scores> ? layout.q_tiles : layout.q)),
      .k_offset = (static_cast<const char*>(t.k) - static_cast<const char*>(first_tile.k)) / key_bytes,
      .v_offset = (static_cast<const char*>(t.v) - static_cast<const char*>(first_tile.v)) / key_bytes,
      .logits = logits_of(t, false),
      .sums = partial_at(reinterpret_cast<float*>(t.scratch + layout.sums), t.count),
      .tiles = reinterpret_cast<float*>(t.scratch + layout.out_tiles)};
  open_run<Scores>(head);
  const int stride = query_stride<Scores>(t.head_dim_qk);
  for (int r = 0; r < t.count; ++r) {
    const std::int64_t row = (t.first + r) / t.group;
    const std::int64_t in_group = (t.first + r) % t.group;
    alignas(64) typename Scores::Query of_tiles[on_tiles<Scores> ? most_columns : 1];
    auto* const packed = on_tiles<Scores> ? of_tiles : head.q + static_cast<std::int64_t>(r) * stride;
    scale_row(static_cast<const T*>(t.q.data) + row * t.q.row_stride + in_group * t.q.head_stride,
              t.head_dim_qk, head.logits.sign, packed);
    __builtin_memset(packed + t.head_dim_qk, 0,
                     static_cast<unsigned long>(stride - t.head_dim_qk) * sizeof(*packed));
    if constexpr (requires { Scores::arrange(packed, stride); }) Scores::arrange(packed, stride);
    if constexpr (requires { Scores::place(packed, stride, r, head.q); }) {
      Scores::place(packed, stride, r, head.q);
    }
  }
  return head;
}

template <typename Scores, typename T, typename K>
void attend(const ForwardTile* tiles, int heads, const SplitKeys& keys, double* partials,
            std::int64_t stride) {
  const ForwardTile& t = tiles[0];
  const std::int64_t begin = keys.begin;
  const std::int64_t end = keys.end;
  Head<typename Scores::Query> group[short_heads];
  for (int h = 0; h < heads; ++h) {
    group[h] = open_head<Scores, T>(tiles[h], t, sizeof(K));
    clear(partial_at(partials + h * stride, t.count), t.count, t.head_dim_v);
  }
  [[maybe_unused]] RoomOf<Scores> room;
  const SeenKeys seen = seen_keys(t);
  constexpr int block_keys = keys_of_block<Scores>;
  const auto keys_from = [](std::int64_t key, std::int64_t last) {
    return last - key < block_keys ? static_cast<int>(last - key) : block_keys;
  };
  BlockRows<K> blocks[2];
  if constexpr (on_tiles<Scores>) blocks[0].whole = blocks[1].whole = short_block;
  const auto ahead_in = [&](const BlockRows<K>& rows) {
    return RowsAhead<K>(t, rows, heads, heads > 1 ? group[1].k_offset : 0, heads > 1 ? group[1].v_offset : 0,
                        on_tiles<Scores>);
  };
  if (begin < end) {
    list_rows(t, begin, keys_from(begin, end), blocks[0]);
    if constexpr (!on_tiles<Scores>) touch_rows(blocks[0]);
    if (!keys.fetched) ahead_in(blocks[0]).fetch_all();
  }
  bool fresh = true;  // whether the run of keys begins
  for (std::int64_t key = begin, n = 0; key < end; key += block_keys, ++n) {
    const BlockRows<K>& block = blocks[n % 2];
    BlockRows<K>& next = blocks[(n + 1) % 2];
    next.count = 0;
    const std::int64_t after = key + block_keys;
    if (const std::int64_t last = after < end ? end : keys.next_end; after < last)
      list_rows(t, after, keys_from(after, last), next);
    if constexpr (!on_tiles<Scores>) touch_rows(next);
    RowsAhead<K> ahead = ahead_in(next);
    for (int h = 0; h < heads; ++h) attend_head<Scores>(group[h], key, block, seen, room, fresh, ahead);
    ahead.fetch_all();
    fresh = false;
    if ((key - begin) / run_keys == (key + block_keys - begin) / run_keys && key + block_keys < end) continue;
    for (int h = 0; h < heads; ++h) {
#if defined(TANDEM_MATRIX_UNIT)
      if constexpr (on_tiles<Scores>) {
        leave_tiles<K>(group[h].tiles, t.count, t.head_dim_v, group[h].sums.out);
      }
#endif
      fold(tiles[h], partial_at(partials + h * stride, t.count), group[h].sums);
      open_run<Scores>(group[h]);
    }
    fresh = true;
  }
}

/// Calls f<T, K> with the types of q and of k and v.
template <typename Function>
TANDEM_INLINE void with_types(const ForwardTile& t, Function f) {
  const auto with_keys = [&]<typename T>() {
    with_key_type<T>(t, [&]<typename K>() { f.template operator()<T, K>(); });
  };
  switch (t.dtype) {
    case DType::f16: with_keys.template operator()<f16>(); break;
    case DType::bf16: with_keys.template operator()<bf16>(); break;
    case DType::e4m3: f.template operator()<e4m3, e4m3>(); break;
    default: with_keys.template operator()<float>(); break;
  }
}

template <typename T, typename K>
struct ScoresOf {
  using Type = WideScores<K>;
};
#if defined(TANDEM_MATRIX_UNIT)
template <typename K>
struct ScoresOf<bf16, K> {
  using Type = TileScores<K>;
};
template <>
struct ScoresOf<e4m3, e4m3> {
  using Type = TileScores<e4m3>;
};
#elif defined(__AVX512BF16__)
template <typename K>
struct ScoresOf<bf16, K> {
  using Type = PairScores<K>;
};
#elif HWY_TARGET <= HWY_AVX3
/// Intel's dot product of pairs has half the rate of multiply-add in f32.
template <>
struct ScoresOf<bf16, bf16> {
  using Type = SplitScores;
};
#endif

void attend_short(const ForwardTile* tiles, int heads, const SplitKeys& keys, double* partials,
                  std::int64_t stride) {
  with_types(tiles[0], [&]<typename T, typename K>() {
    attend<typename ScoresOf<T, K>::Type, T, K>(tiles, heads, keys, partials, stride);
  });
}

void fold_short(const ForwardTile& t, double* total, const double* next) {
  fold(t, partial_at(total, t.count), partial_at(next, t.count));
}

template <typename T, typename K, typename Out>
void write(const ForwardTile& t, const PartialView<const double>& total) {
  const float scale = logits_of(t, false).scale;
  auto* const out = reinterpret_cast<float*>(t.scratch + short_scratch(t.head_dim_qk, t.head_dim_v).sums);
  for (int r = 0; r < t.count; ++r) {
    const std::int64_t row = (t.first + r) / t.group;
    const std::int64_t head = (t.first + r) % t.group;
    const RowKeys keys = row_keys(t, row);
    if (keys.end - keys.begin == 1 && t.sink == nullptr) {
      write_one_key_row<T, K, Out>(t, row, head, keys.begin);
      continue;
    }
    // Rounded as the backward pass rounds logits: where one key takes a whole row, LSE is its logit there.
    const float top = static_cast<float>(total.maximum[r]) * scale;
    const double* const sums = total.out + static_cast<std::int64_t>(r) * t.head_dim_v;
    for (int c = 0; c < t.head_dim_v; ++c) out[c] = static_cast<float>(sums[c]);
    // Where all logits are -inf, the portable target has the lowest finite number as their maximum.
    const float max_logit = total.sum[r] == 0.0 ? negative_infinity : top;
    write_row<Out>(t, row, head, keys.begin < keys.end,
                   {.top = top, .sum = static_cast<float>(total.sum[r]), .max_logit = max_logit}, out);
  }
}

void finish_short(const ForwardTile& t, const double* total) {
  const PartialView<const double> state = partial_at(total, t.count);
  with_types(t, [&]<typename T, typename K>() {
    with_out_type(t, [&]<typename Out>() { write<T, K, Out>(t, state); });
  });
}

}  // namespace

extern const ShortKernel short_kernel;
const ShortKernel short_kernel{.attend = attend_short, .fold = fold_short, .finish = finish_short};

}  // namespace tandem::cpu::TANDEM_TARGET
