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
#include "cpu/forward/products.hpp"
#include "cpu/forward/rows.hpp"
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

template <typename Math>
void fold(const Stripe<Math>& s, int dims, const Logits& logits) {
  fold_run<stripe_lanes<Math>>(s.totals, dims, s.out, s.sum, s.maximum, [&](Vec old, Vec now) {
    return exponent_between(base_of(old, logits), base_of(now, logits), logits);
  });
}

/// Forgets what the rows of a stripe have seen. A fresh O is written before it is read.
template <typename Math>
void restart(const Stripe<Math>& s, int dims) {
  for (int i = 0; i < stripe_lanes<Math>; ++i) {
    s.maximum[i] = negative_infinity;
    s.sum[i] = 0.0F;
  }
  if (s.fresh) return;
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
    s.largest = t.max_logits.data != nullptr ? floats(layout.largest) + lane : nullptr;
    for (int i = 0; s.largest != nullptr && i < stripe_lanes<Math>; ++i) s.largest[i] = negative_infinity;
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
                Stripes<Math>& stripes, std::int64_t begin, std::int64_t end) {
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
    if (key != fetched) rows_ahead<K>(t, key, count).fetch();
    Block<Math> block = stage<Math, K>(t, layout, key, count);
    block.k_scales = scales_of_block(t, t.k_scales, key, count, k_scales);
    block.v_scales = scales_of_block(t, t.v_scales, key, count, v_scales);
    const std::int64_t left = stripes.end - key - count;
    if (left > 0) fetched = key + count;
    Ahead ahead = left > 0 ? rows_ahead<K>(t, fetched, left < t.block_k ? static_cast<int>(left) : t.block_k)
                           : out_ahead(t);
    constexpr int keys_of_tile = on_tiles<Math> ? 32 : tile_rows(stripe_vecs<Math>);
    ahead.share(stripes.count * ((count + keys_of_tile - 1) / keys_of_tile));
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
    const std::int64_t begin = stripes.begin;
    const std::int64_t end = stripes.end;
    const std::int64_t first = begin < end ? runs.at(begin) : 0;
    const std::int64_t last = begin < end ? runs.at(end - 1) : -1;
    // Sums of rows that see no more than one run have the same bits either way.
    const bool in_runs = first < last;
    if (!in_runs) mark_fresh();
    pack_stripes<Math, T>(t, layout, logits, stripes);
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

  /// Where every product is TileStream's, the first of a stripe needs no zeros to add to.
  void mark_fresh() {
#if defined(TANDEM_MATRIX_UNIT)
    if constexpr (on_tiles<Math>) {
      for (int i = 0; i < stripes.count; ++i) stripes.of[i].fresh = TileStream::streams(t);
    }
#endif
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
      float* const others = sums + numbers;
      __builtin_memcpy(others + stripe_lanes<Math>, s.maximum, stripe_lanes<Math> * sizeof(float));
      if (s.largest == nullptr) continue;
      __builtin_memcpy(others + 2 * stripe_lanes<Math>, s.largest, stripe_lanes<Math> * sizeof(float));
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
        const float* const largest = s.maximum + stripe_lanes<Math>;
        for (int lane = 0; s.largest != nullptr && lane < stripe_lanes<Math>; lane += vec_lanes) {
          store(hn::Max(load(largest + lane), load(s.largest + lane)), s.largest + lane);
        }
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
