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

#include "cpu/common/logits.hpp"
#include "cpu/decode/products.hpp"
#include "cpu/forward/one_key.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/simd/stage.hpp"

namespace tandem::cpu::TANDEM_TARGET {
namespace {

constexpr int padded(int columns) {
  return (columns + vec_lanes - 1) / vec_lanes * vec_lanes;
}

/// Rows of the next block fetched for each group of scores; products with V fetch one for each key.
constexpr int rows_ahead = 3;

/// A view of a partial result, or of the sums of a run: maximum[rows], sum[rows], out[rows][head_dim_v].
template <typename Float>
struct PartialView {
  Float* maximum;
  Float* sum;
  Float* out;
};
using RunSums = PartialView<float>;

template <typename Float>
TANDEM_INLINE PartialView<Float> partial_at(Float* data, int rows) {
  return {data, data + rows, data + 2 * rows};
}

/// Transforms the scores of a row, which is padded to whole registers.
TANDEM_INLINE void transform_row(float* s, int count, const Logits& logits) {
  for (int j = 0; j < count; j += vec_lanes) store(logits.transform(load(s + j)), s + j);
}

/// Turns one row's scores into weights and brings its maximum, sum and O up to date.
TANDEM_INLINE void soften_row(float* s, int count, float factor, const RunSums& state, int row, int columns) {
  // Whole registers: what lies past `count` takes part as -inf, with weight 0.
  for (int j = count; j < padded(count); ++j) s[j] = negative_infinity;
  Vec top = broadcast(negative_infinity);
  for (int j = 0; j < count; j += vec_lanes) top = hn::Max(load(s + j), top);
  const float block = hn::GetLane(hn::MaxOfLanes(f32_lanes, top));
  float maximum = state.maximum[row];
  if (block > maximum) {
    const float alpha = __builtin_exp2f((maximum - block) * factor);
    float* out = state.out + static_cast<std::int64_t>(row) * columns;
    for (int c = 0; c < columns; ++c) out[c] *= alpha;
    state.sum[row] *= alpha;
    state.maximum[row] = maximum = block;
  }
  const Vec base = broadcast(maximum == negative_infinity ? 0.0F : maximum);
  Vec sum = zero();
  for (int j = 0; j < count; j += vec_lanes) {
    const Vec p = exp2(hn::Mul(hn::Sub(load(s + j), base), broadcast(factor)));
    store(p, s + j);
    sum = hn::Add(sum, p);
  }
  state.sum[row] += hn::GetLane(hn::SumOfLanes(f32_lanes, sum));
}

/// The sums of no key.
template <typename Float>
TANDEM_INLINE void clear(const PartialView<Float>& sums, int rows, int columns) {
  for (int r = 0; r < rows; ++r) {
    sums.maximum[r] = static_cast<Float>(negative_infinity);
    sums.sum[r] = 0;
  }
  __builtin_memset(sums.out, 0,
                   static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns) * sizeof(Float));
}

/// Adds the sums `b` to `a`.
template <typename Float>
void fold(const ForwardTile& t, const PartialView<double>& a, const PartialView<Float>& b) {
  const auto factor = static_cast<double>(logits_of(t, false).factor);
  for (int r = 0; r < t.count; ++r) {
    const double next = static_cast<double>(b.maximum[r]);
    const double top = a.maximum[r] > next ? a.maximum[r] : next;
    const double base = top == static_cast<double>(negative_infinity) ? 0.0 : top;
    const double weight_a = __builtin_exp2((a.maximum[r] - base) * factor);
    const double weight_b = __builtin_exp2((next - base) * factor);
    a.maximum[r] = top;
    a.sum[r] = a.sum[r] * weight_a + static_cast<double>(b.sum[r]) * weight_b;
    double* out_a = a.out + static_cast<std::int64_t>(r) * t.head_dim_v;
    const auto* out_b = b.out + static_cast<std::int64_t>(r) * t.head_dim_v;
    for (int c = 0; c < t.head_dim_v; ++c) {
      out_a[c] = out_a[c] * weight_a + static_cast<double>(out_b[c]) * weight_b;
    }
  }
}

/// What one KV head has of its own.
template <typename Query>
struct Head {
  const ForwardTile* tile;
  Query* q;
  std::int64_t k_offset;  ///< from the first head's rows
  std::int64_t v_offset;
  Logits logits;
  RunSums sums;
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
  const bool masked = begin < seen.all_begin || begin + block.count > seen.all_end;
  for (int r = 0; r < rows; ++r) {
    float* s = scores + r * short_block;
    if (scales.k != nullptr) multiply_row(s, block.count, scales.k);
    if (head.logits.transforms()) transform_row(s, block.count, head.logits);
    if (masked) hide_keys(seen.rows[first + r], begin, block.count, s);
    soften_row(s, block.count, head.logits.factor, head.sums, first + r, t.head_dim_v);
    if (scales.v != nullptr) multiply_row(s, block.count, scales.v);
  }
  weigh<Scores, rows>(block.v, head.v_offset, block.count, scores,
                      head.sums.out + static_cast<std::int64_t>(first) * t.head_dim_v, t.head_dim_v, ahead);
}

/// All rows of a head against a block of keys.
template <typename Scores, typename K>
TANDEM_INLINE void attend_rows(const Head<typename Scores::Query>& head, std::int64_t begin,
                               const BlockRows<K>& rows, const SeenKeys& seen, RowsAhead<K>& ahead) {
  BlockRows<K> of_head;
  if (rows.missing) {
    of_head = rows;
    of_head.keep_missing(head.k_offset, head.v_offset);
  }
  const BlockRows<K>& block = rows.missing ? of_head : rows;
  const int count = head.tile->count;
  const BlockScales scales(*head.tile, begin, block.count);
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

template <typename Scores, typename T>
Head<typename Scores::Query> open_head(const ForwardTile& t, const ForwardTile& first_tile,
                                       std::int64_t key_bytes) {
  const ShortScratch layout = short_scratch(t.head_dim_qk, t.head_dim_v);
  Head<typename Scores::Query> head{
      .tile = &t,
      .q = reinterpret_cast<typename Scores::Query*>(t.scratch + layout.q),
      .k_offset = (static_cast<const char*>(t.k) - static_cast<const char*>(first_tile.k)) / key_bytes,
      .v_offset = (static_cast<const char*>(t.v) - static_cast<const char*>(first_tile.v)) / key_bytes,
      .logits = logits_of(t, false),
      .sums = partial_at(reinterpret_cast<float*>(t.scratch + layout.sums), t.count)};
  clear(head.sums, t.count, t.head_dim_v);
  const int stride = query_stride<Scores>(t.head_dim_qk);
  for (int r = 0; r < t.count; ++r) {
    const std::int64_t row = (t.first + r) / t.group;
    const std::int64_t in_group = (t.first + r) % t.group;
    auto* const packed = head.q + static_cast<std::int64_t>(r) * stride;
    scale_row(static_cast<const T*>(t.q.data) + row * t.q.row_stride + in_group * t.q.head_stride,
              t.head_dim_qk, head.logits.sign, packed);
    __builtin_memset(packed + t.head_dim_qk, 0,
                     static_cast<unsigned long>(stride - t.head_dim_qk) * sizeof(*packed));
    if constexpr (requires { Scores::arrange(packed, stride); }) Scores::arrange(packed, stride);
  }
  return head;
}

template <typename Scores, typename T, typename K>
void attend(const ForwardTile* tiles, int heads, std::int64_t begin, std::int64_t end, double* partials,
            std::int64_t stride) {
  const ForwardTile& t = tiles[0];
  Head<typename Scores::Query> group[short_heads];
  for (int h = 0; h < heads; ++h) {
    group[h] = open_head<Scores, T>(tiles[h], t, sizeof(K));
    clear(partial_at(partials + h * stride, t.count), t.count, t.head_dim_v);
  }
  const SeenKeys seen = seen_keys(t);
  const auto keys_from = [&](std::int64_t key) {
    return end - key < short_block ? static_cast<int>(end - key) : short_block;
  };
  BlockRows<K> blocks[2];
  const auto ahead_in = [&](const BlockRows<K>& rows) {
    return RowsAhead<K>(t, rows, heads, heads > 1 ? group[1].k_offset : 0, heads > 1 ? group[1].v_offset : 0);
  };
  if (begin < end) {
    list_rows(t, begin, keys_from(begin), blocks[0]);
    touch_rows(blocks[0]);
    ahead_in(blocks[0]).fetch_all();
  }
  for (std::int64_t key = begin, n = 0; key < end; key += short_block, ++n) {
    const BlockRows<K>& block = blocks[n % 2];
    BlockRows<K>& next = blocks[(n + 1) % 2];
    next.count = 0;
    if (key + short_block < end) list_rows(t, key + short_block, keys_from(key + short_block), next);
    touch_rows(next);
    RowsAhead<K> ahead = ahead_in(next);
    for (int h = 0; h < heads; ++h) attend_rows<Scores>(group[h], key, block, seen, ahead);
    ahead.fetch_all();
    if ((key - begin) / run_keys == (key + short_block - begin) / run_keys && key + short_block < end)
      continue;
    for (int h = 0; h < heads; ++h) {
      fold(tiles[h], partial_at(partials + h * stride, t.count), group[h].sums);
      clear(group[h].sums, t.count, t.head_dim_v);
    }
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
#if defined(__AVX512BF16__)
template <typename K>
struct ScoresOf<bf16, K> {
  using Type = PairScores<K>;
};
#endif
#if HWY_TARGET <= HWY_AVX3 && (!defined(__AVX512BF16__) || defined(TANDEM_MATRIX_UNIT))
/// Intel's dot product of pairs has half the rate of multiply-add in f32.
template <>
struct ScoresOf<bf16, bf16> {
  using Type = SplitScores;
};
#endif

void attend_short(const ForwardTile* tiles, int heads, std::int64_t begin, std::int64_t end, double* partials,
                  std::int64_t stride) {
  with_types(tiles[0], [&]<typename T, typename K>() {
    attend<typename ScoresOf<T, K>::Type, T, K>(tiles, heads, begin, end, partials, stride);
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
    write_row<Out>(t, row, head, keys.begin < keys.end, {.top = top, .sum = static_cast<float>(total.sum[r])},
                   out);
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
