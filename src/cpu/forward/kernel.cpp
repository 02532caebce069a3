// One tile of queries against all the keys it sees: blocked online softmax with query rows in the lanes.
//
//   S^T = K Q^T, softmax down the lanes, O^T += V^T P^T, and O transposed once at the end
//   (docs/kernels/cpu.md).
//
// Compiled once for each instruction set (targets/targets.cmake).
#include "cpu/forward/finish_row.hpp"
#include "cpu/forward/function.hpp"
#include "cpu/forward/key_rows.hpp"
#include "cpu/forward/lane_totals.hpp"
#include "cpu/forward/one_key.hpp"
#include "cpu/forward/products.hpp"
#include "cpu/forward/softmax.hpp"
#include "cpu/forward/stage.hpp"
#include "cpu/forward/tile.hpp"
#include "cpu/forward/tile_stream.hpp"
#include "cpu/simd/matrix_unit.hpp"
#include "cpu/simd/stage.hpp"

namespace tandem::cpu::TANDEM_TARGET {
namespace {

/// One block of keys against one stripe of queries. `functions` is null where the caller has none.
template <typename Math>
void attend(const Block<Math>& b, const Stripe<Math>& s, const ForwardTile& t, const Logits& logits,
            float* scores, const FunctionRows<Math>* functions, Ahead& ahead) {
  if (b.begin >= s.end || b.begin + b.count <= s.begin) return;
  LaneKeys keys[stripe_vecs<Math>];
  Segment segments[max_block_k / vec_lanes];
  int segment_count = 1;
  if (functions != nullptr) {
    for (int v = 0; v < s.vecs; ++v) keys[v] = functions->keys(v, b.count);
  }
  if (functions == nullptr && b.begin >= s.all_begin && b.begin + b.count <= s.all_end) {
    for (int v = 0; v < s.vecs; ++v) keys[v] = all_keys(b.count);
    segments[0] = {.begin = 0, .end = b.count, .first_vec = 0, .last_vec = s.vecs};
  } else {
    for (int v = 0; functions == nullptr && v < s.vecs; ++v) keys[v] = lane_keys(s, b, v);
    segment_count = t.split_size == 0 ? cut_segments<Math>(keys, s.vecs, b.count, segments) : 0;
    // Keys inside a segment are all softened. What registers see by a function may have gaps there.
    if (t.split_size != 0 || (functions != nullptr && have_gaps(keys, segments, segment_count))) {
      segments[0] = widen_to_one(keys, s.vecs, b.count);
      segment_count = segments[0].first_vec < segments[0].last_vec ? 1 : 0;
    }
  }

  constexpr int epw = Math::elements_per_word;
  for (int i = 0; i < segment_count; ++i) {
    const Segment& g = segments[i];
    with_vecs<Math>(g.last_vec - g.first_vec, [&]<int vecs>() {
      score<Math, vecs>(b.k + g.begin * b.k_stride, b.k_stride, g.end - g.begin,
                        s.q + g.first_vec * vec_lanes, t.head_dim_qk / epw,
                        scores + g.begin * stripe_lanes<Math> + g.first_vec * vec_lanes, ahead);
    });
    if (b.k_scales != nullptr) scale_scores<Math>(scores, g, b.k_scales);
  }
  for (int v = 0; v < s.vecs; ++v) {
    if (keys[v].begin >= keys[v].end) continue;
    if (functions != nullptr) {
      soften(s, v, functions->make_logits(v, keys[v], scores), functions->plain, t.head_dim_v, scores,
             b.v_scales);
      functions->drop(v, keys[v], scores);
    } else {
      soften(s, v, keys[v], logits, t.head_dim_v, scores, b.v_scales);
    }
  }
  auto* p = reinterpret_cast<typename Math::Word*>(scores);
  for (int i = 0; i < segment_count; ++i) {
    const Segment& g = segments[i];
    with_vecs<Math>(g.last_vec - g.first_vec, [&]<int vecs>() {
      accumulate<Math, vecs>(b.v + g.begin / epw * b.v_stride, b.v_stride, t.head_dim_v,
                             p + g.begin / epw * stripe_lanes<Math> + g.first_vec * vec_lanes,
                             (g.end - g.begin + epw - 1) / epw, s.out + g.first_vec * vec_lanes);
    });
  }
}

/// Q^T of one stripe, times `factor`: 1, -1 or 0.
template <typename Math, typename T>
void pack_queries(const ForwardTile& t, std::int64_t first, int count, float factor, float* rows,
                  typename Math::Word* q) {
  constexpr bool pairs = Math::elements_per_word == 2;
  const int words = t.head_dim_qk / Math::elements_per_word;
  std::int64_t row = first / t.group;
  std::int64_t head = first % t.group;
  for (int lane = 0; lane < count; lane += vec_lanes) {
    for (int i = 0; i < vec_lanes; ++i) {
      float* packed = rows + i * words;
      if (lane + i >= count) {
        __builtin_memset(packed, 0, static_cast<std::size_t>(words) * sizeof(float));
        continue;
      }
      const T* source = static_cast<const T*>(t.q.data) + row * t.q.row_stride + head * t.q.head_stride;
      if constexpr (pairs) {
        scale_row(source, t.head_dim_qk, factor, reinterpret_cast<T*>(packed));
      } else {
        scale_row(source, t.head_dim_qk, factor, packed);
      }
      if (++head == t.group) {
        head = 0;
        ++row;
      }
    }
    transpose(rows, words, vec_lanes, words, reinterpret_cast<float*>(q) + lane, stripe_lanes<Math>);
  }
  if constexpr (on_tiles<Math>) {
    const auto spare = static_cast<std::size_t>(in_tiles(t.head_dim_qk) / 2 - words);
    __builtin_memset(q + words * stripe_lanes<Math>, 0, spare * stripe_lanes<Math> * sizeof(*q));
  }
}

/// Which keys each row of a stripe sees.
template <typename Math>
void bound_keys(const ForwardTile& t, std::int64_t first, Stripe<Math>& s) {
  s.begin = s.all_end = t.seqlen_k;
  s.end = s.all_begin = 0;
  for (int lane = 0; lane < s.count; ++lane) {
    const RowKeys keys = row_keys(t, (first + lane) / t.group);
    const std::int64_t begin = keys.begin;
    const std::int64_t end = keys.end;
    s.first_key[lane] = begin;
    s.last_key[lane] = end;
    if (begin > s.all_begin) s.all_begin = begin;
    if (end < s.all_end) s.all_end = end;
    if (begin >= end) continue;
    if (begin < s.begin) s.begin = begin;
    if (end > s.end) s.end = end;
  }
}

/// What a row of a stripe has seen.
template <typename Math>
struct SeenRow {
  bool seen;
  bool one_key;
  RowSum sum;
  SeenRow(const ForwardTile& t, const Stripe<Math>& s, int lane, const Logits& logits)
      : sum{.top = logit_of_base(s.maximum[lane], logits), .sum = s.sum[lane]} {
    const std::int64_t keys = s.last_key[lane] - s.first_key[lane];
    // By functions, a row whose logits are all -inf sees nothing; of one that has a NaN the sum is NaN.
    seen = t.functions != nullptr ? s.maximum[lane] != negative_infinity || s.sum[lane] != 0.0F : keys > 0;
    one_key = t.functions == nullptr && keys == 1 && t.sink == nullptr;
  }
};

/// Calls f(lane, row, head) for the rows of a register.
template <typename Math, typename Function>
TANDEM_INLINE void for_rows(const ForwardTile& t, std::int64_t first, const Stripe<Math>& s, int lane,
                            const Function& f) {
  std::int64_t row = (first + lane) / t.group;
  std::int64_t head = (first + lane) % t.group;
  for (int i = lane; i < lane + vec_lanes && i < s.count; ++i) {
    f(i, row, head);
    if (++head == t.group) {
      head = 0;
      ++row;
    }
  }
}

/// O and LSE of one stripe, out of the lanes. `rows`: head_dim_v words for each lane of a register.
template <typename Math, typename T, typename K, typename Out>
void write_rows(const ForwardTile& t, std::int64_t first, const Stripe<Math>& s, const Logits& logits,
                float* rows) {
  fetch_rows<Out, true>(t, t.out, first, s.count, t.head_dim_v);
  const auto dims = static_cast<std::size_t>(t.head_dim_v);
  // Pairs of columns are half as many words to transpose.
  constexpr bool pairs = __is_same(Out, bf16) && Math::elements_per_word == 2;
  const bool narrow = pairs && dims % 2 == 0;
  for (int lane = 0; lane < s.count; lane += vec_lanes) {
    alignas(64) float scales[vec_lanes] = {};
    for_rows(t, first, s, lane, [&](int i, std::int64_t row, std::int64_t head) {
      const SeenRow<Math> seen(t, s, i, logits);
      if (!seen.one_key) scales[i - lane] = close_row(t, row, head, seen.seen, seen.sum);
    });
    if constexpr (pairs) {
      if (narrow) narrow_rows(s.out + lane, stripe_lanes<Math>, t.head_dim_v, load(scales), rows);
    }
    if (!narrow) transpose(s.out + lane, stripe_lanes<Math>, t.head_dim_v, vec_lanes, rows, t.head_dim_v);
    for_rows(t, first, s, lane, [&](int i, std::int64_t row, std::int64_t head) {
      const SeenRow<Math> seen(t, s, i, logits);
      if (seen.one_key) return write_one_key_row<T, K, Out>(t, row, head, s.first_key[i]);
      Out* const out = out_row<Out>(t, row, head);
      if (!seen.seen) {  // 0 whatever was accumulated: a NaN in V reaches every row of a block
        __builtin_memset(out, 0, dims * sizeof(Out));
      } else if (narrow) {
        __builtin_memcpy(out, reinterpret_cast<const Out*>(rows) + (i - lane) * t.head_dim_v,
                         dims * sizeof(Out));
      } else {
        scale_row(rows + (i - lane) * t.head_dim_v, t.head_dim_v, scales[i - lane], out);
      }
    });
  }
}

template <typename Math>
void fold(const Stripe<Math>& s, int dims, const Logits& logits) {
  fold_run<stripe_lanes<Math>>(s.totals, dims, s.out, s.sum, s.maximum, [&](Vec old, Vec now) {
    return exponent_between(base_of(old, logits), base_of(now, logits), logits);
  });
}

/// Forgets what the rows of a stripe have seen.
template <typename Math>
void restart(const Stripe<Math>& s, int dims) {
  for (int i = 0; i < stripe_lanes<Math>; ++i) {
    s.maximum[i] = negative_infinity;
    s.sum[i] = 0.0F;
  }
  __builtin_memset(s.out, 0, static_cast<std::size_t>(in_tiles(dims)) * stripe_lanes<Math> * sizeof(float));
}

template <typename Math>
void open_stripes(const ForwardTile& t, const ForwardScratch& layout, Stripes<Math>& stripes) {
  const auto floats = [&](std::size_t offset) { return reinterpret_cast<float*>(t.scratch + offset); };
  stripes.begin = t.seqlen_k;
  for (int lane = 0; lane < t.count; lane += stripe_lanes<Math>) {
    Stripe<Math>& s = stripes.of[stripes.count++];
    s.count = t.count - lane < stripe_lanes<Math> ? t.count - lane : stripe_lanes<Math>;
    s.vecs = (s.count + vec_lanes - 1) / vec_lanes;
    s.q = reinterpret_cast<typename Math::Word*>(t.scratch + layout.q) +
          static_cast<std::int64_t>(lane) * in_tiles(t.head_dim_qk);
    s.out = floats(layout.out) + static_cast<std::int64_t>(lane) * in_tiles(t.head_dim_v);
    s.maximum = floats(layout.maximum) + lane;
    s.sum = floats(layout.sum) + lane;
    s.first_key = reinterpret_cast<std::int64_t*>(t.scratch + layout.first_key) + lane;
    s.last_key = reinterpret_cast<std::int64_t*>(t.scratch + layout.last_key) + lane;
    bound_keys(t, t.first + lane, s);
    if (s.begin < stripes.begin) stripes.begin = s.begin;
    if (s.end > stripes.end) stripes.end = s.end;
  }
}

template <typename Math, typename T>
void pack_stripes(const ForwardTile& t, const ForwardScratch& layout, const Logits& logits,
                  const Stripes<Math>& stripes) {
  auto* const rows = reinterpret_cast<float*>(t.scratch + layout.rows);
  for (int i = 0; i < stripes.count; ++i) {
    const Stripe<Math>& s = stripes.of[i];
    const std::int64_t first = t.first + static_cast<std::int64_t>(i) * stripe_lanes<Math>;
    fetch_rows<T, false>(t, t.q, first, s.count, t.head_dim_qk);
    pack_queries<Math, T>(t, first, s.count, logits.sign, rows, s.q);
    restart(s, t.head_dim_v);
  }
}

/// The totals of all stripes of a tile, none of whose runs has been added.
template <typename Math>
void open_all_totals(const ForwardTile& t, const ForwardScratch& layout, Stripes<Math>& stripes) {
  for (int i = 0; i < stripes.count; ++i) {
    Stripe<Math>& s = stripes.of[i];
    s.totals = totals_at(t.scratch + layout.totals, t.block_q, i * stripe_lanes<Math>, t.head_dim_v);
    open_totals<stripe_lanes<Math>>(s.totals, t.head_dim_v);
  }
}

/// The scales of a block's keys, in `memory`; null if there are none by row.
TANDEM_INLINE const float* scales_of_block(const ForwardTile& t, const TileScales& scales, std::int64_t begin,
                                           int count, float* memory) {
  if (scales.data == nullptr) return nullptr;
  gather_scales(t, scales, begin, count, memory);
  return memory;
}

/// Keys [begin, end) against all stripes, block by block. Blocks start at multiples of block_k, whatever rows
/// the tile has.
template <typename Math, typename K>
void attend_run(const ForwardTile& t, const ForwardScratch& layout, const Logits& logits,
                const Stripes<Math>& stripes, std::int64_t begin, std::int64_t end) {
  auto* const scores = reinterpret_cast<float*>(t.scratch + layout.scores);
  float k_scales[max_block_k];
  float v_scales[max_block_k];
  if (t.functions != nullptr) prepare_functions<Math>(t, layout);
  std::int64_t fetched = -1;
#if defined(TANDEM_MATRIX_UNIT)
  TileStream stream(t, logits, scores);
#endif
  for (std::int64_t key = begin / t.block_k * t.block_k; key < end; key += t.block_k) {
    const int count = end - key < t.block_k ? static_cast<int>(end - key) : t.block_k;
    if (t.functions != nullptr && !see_by_functions(t, layout, stripes, key, count)) continue;
    if (key != fetched) rows_ahead<K>(t, key, count).fetch(count);
    Block<Math> block = stage<Math, K>(t, layout, key, count);
    block.k_scales = scales_of_block(t, t.k_scales, key, count, k_scales);
    block.v_scales = scales_of_block(t, t.v_scales, key, count, v_scales);
    Ahead ahead;
    const std::int64_t left = stripes.end - key - count;
    if (left > 0) {
      fetched = key + count;
      ahead = rows_ahead<K>(t, fetched, left < t.block_k ? static_cast<int>(left) : t.block_k);
      ahead.share(stripes.count, on_tiles<Math> ? 32 : tile_rows(stripe_vecs<Math>));
    }
    for (int i = 0; i < stripes.count; ++i) {
#if defined(TANDEM_MATRIX_UNIT)
      if constexpr (on_tiles<Math>) {
        if (stream.attend(block, stripes.of[i], ahead)) continue;
      }
#endif
      if (t.functions == nullptr) {
        attend<Math>(block, stripes.of[i], t, logits, scores, nullptr, ahead);
      } else {
        const FunctionRows<Math> rows(t, layout, logits, i, key);
        attend(block, stripes.of[i], t, logits, scores, &rows, ahead);
      }
    }
  }
}

template <typename Math, typename T, typename K>
void write_stripes(const ForwardTile& t, const ForwardScratch& layout, const Logits& logits,
                   const Stripes<Math>& stripes) {
  auto* const rows = reinterpret_cast<float*>(t.scratch + layout.rows);
  for (int i = 0; i < stripes.count; ++i) {
    const std::int64_t first = t.first + static_cast<std::int64_t>(i) * stripe_lanes<Math>;
    with_out_type(
        t, [&]<typename Out>() { write_rows<Math, T, K, Out>(t, first, stripes.of[i], logits, rows); });
  }
}

template <typename Math>
void close_all_totals(const ForwardTile& t, const Stripes<Math>& stripes) {
  for (int i = 0; i < stripes.count; ++i) {
    const Stripe<Math>& s = stripes.of[i];
    close_totals<stripe_lanes<Math>>(s.totals, t.head_dim_v, s.out, s.sum, s.maximum);
  }
}

/// A tile whole, in pieces or from its pieces. `T` is q's type, `K` that of k and v.
template <typename Math, typename T, typename K>
struct TilePass {
  const ForwardTile& t;
  const ForwardScratch layout = forward_scratch(t.block_q, t.block_k, t.head_dim_qk, t.head_dim_v);
  const Logits logits = logits_of(t, t.functions != nullptr && t.functions->score != nullptr);
  const KeyRuns runs = key_runs(t.split_size, t.block_k);
  Stripes<Math> stripes{};

  void run() {
    open_stripes(t, layout, stripes);
    pack_stripes<Math, T>(t, layout, logits, stripes);
    const std::int64_t begin = stripes.begin;
    const std::int64_t end = stripes.end;
    const std::int64_t first = begin < end ? runs.at(begin) : 0;
    const std::int64_t last = begin < end ? runs.at(end - 1) : -1;
    // Sums of rows that see no more than one run have the same bits either way.
    const bool in_runs = first < last;
    if (in_runs) open_all_totals(t, layout, stripes);
    for (std::int64_t i = first; i <= last; ++i) {
      attend_run<Math, K>(t, layout, logits, stripes, i == first ? begin : runs.begin(i),
                          runs.end(i) < end ? runs.end(i) : end);
      for (int s = 0; in_runs && s < stripes.count; ++s) {
        fold(stripes.of[s], t.head_dim_v, logits);
        // A run of a split has its own maximum, so that it may also be computed alone; others keep theirs,
        // which spares them the first rescaling.
        if (t.split_size != 0) restart(stripes.of[s], t.head_dim_v);
      }
      if (t.stop()) return;
    }
    if (in_runs) close_all_totals(t, stripes);
    write_stripes<Math, T, K>(t, layout, logits, stripes);
  }

  void attend_one(std::int64_t run, float* sums) {
    open_stripes(t, layout, stripes);
    pack_stripes<Math, T>(t, layout, logits, stripes);
    const std::int64_t begin = stripes.begin > runs.begin(run) ? stripes.begin : runs.begin(run);
    const std::int64_t end = stripes.end < runs.end(run) ? stripes.end : runs.end(run);
    if (begin < end) attend_run<Math, K>(t, layout, logits, stripes, begin, end);
    for (int i = 0; i < stripes.count; ++i, sums += split_sum_numbers(stripe_lanes<Math>, t.head_dim_v)) {
      const Stripe<Math>& s = stripes.of[i];
      const std::size_t numbers = static_cast<std::size_t>(t.head_dim_v) * stripe_lanes<Math>;
      __builtin_memcpy(sums, s.out, numbers * sizeof(float));
      __builtin_memcpy(sums + numbers, s.sum, stripe_lanes<Math> * sizeof(float));
      __builtin_memcpy(sums + numbers + stripe_lanes<Math>, s.maximum, stripe_lanes<Math> * sizeof(float));
    }
  }

  void finish(std::int64_t count, float* sums, std::size_t stride) {
    open_stripes(t, layout, stripes);
    open_all_totals(t, layout, stripes);
    const std::size_t numbers = split_sum_numbers(stripe_lanes<Math>, t.head_dim_v);
    for (std::int64_t run = 0; run < count; ++run, sums += stride) {
      for (int i = 0; i < stripes.count; ++i) {
        Stripe<Math> s = stripes.of[i];
        s.out = sums + static_cast<std::size_t>(i) * numbers;
        s.sum = s.out + static_cast<std::size_t>(t.head_dim_v) * stripe_lanes<Math>;
        s.maximum = s.sum + stripe_lanes<Math>;
        fold(s, t.head_dim_v, logits);
      }
    }
    close_all_totals(t, stripes);
    write_stripes<Math, T, K>(t, layout, logits, stripes);
  }
};

/// Calls f with the TilePass of the tile's types.
template <typename Math, typename T, typename Function>
void with_keys(const ForwardTile& t, const Function& f) {
  with_key_type<T>(t, [&]<typename K>() { f(TilePass<Math, T, K>{t}); });
}

template <typename Function>
void with_types(const ForwardTile& t, const Function& f) {
  switch (t.dtype) {
    case DType::f16: with_keys<F32Math, f16>(t, f); break;
    case DType::e4m3: f(TilePass<F32Math, e4m3, e4m3>{t}); break;
    case DType::bf16:
#if defined(__AVX512BF16__)
      if (t.head_dim_qk % 2 == 0) {
        const MatrixUnit in_use;
        with_keys<PairMath, bf16>(t, f);
        break;
      }
#endif
      with_keys<F32Math, bf16>(t, f);
      break;
    default: with_keys<F32Math, float>(t, f); break;
  }
}

void run(const ForwardTile& t) {
  with_types(t, [](auto&& pass) { pass.run(); });
}
void attend_run_alone(const ForwardTile& t, std::int64_t run, float* sums) {
  with_types(t, [&](auto&& pass) { pass.attend_one(run, sums); });
}
void finish_runs(const ForwardTile& t, std::int64_t runs, float* sums, std::size_t stride) {
  with_types(t, [&](auto&& pass) { pass.finish(runs, sums, stride); });
}

}  // namespace

extern const ForwardKernel forward_kernel;
const ForwardKernel forward_kernel{
    .stripe = stripe_lanes<F32Math>, .run = run, .attend = attend_run_alone, .finish = finish_runs};

}  // namespace tandem::cpu::TANDEM_TARGET
