// One tile of queries against all the keys it sees: blocked online softmax with query rows in the lanes.
//
//   S^T = K Q^T, softmax down the lanes, O^T += V^T P^T, and O transposed once at the end
//   (docs/kernels/cpu.md).
//
// Compiled once for each instruction set (targets.cmake).
#include "cpu/finish_row.hpp"
#include "cpu/forward_softmax.hpp"
#include "cpu/forward_stage.hpp"
#include "cpu/forward_tile.hpp"
#include "cpu/key_rows.hpp"
#include "cpu/lane_totals.hpp"
#include "cpu/one_key.hpp"
#include "cpu/simd/product.hpp"
#include "cpu/simd/stage.hpp"

namespace tandem::cpu::TANDEM_TARGET {
namespace {

/// Rows of the next block on their way into the second-level cache while this one is computed: a row of K and
/// a row of V for every key scored.
struct Ahead {
  const char* k = nullptr;
  const char* v = nullptr;
  std::int64_t k_stride = 0;  ///< bytes
  std::int64_t v_stride = 0;
  int k_bytes = 0;
  int v_bytes = 0;
  int rows = 0;

  void fetch(int count) {
    for (; count > 0 && rows > 0; --count, --rows) {
      for (int i = 0; i < k_bytes; i += 64) __builtin_prefetch(k + i, 0, 2);
      for (int i = 0; i < v_bytes; i += 64) __builtin_prefetch(v + i, 0, 2);
      k += k_stride;
      v += v_stride;
    }
  }
};

template <typename Math, int rows, int vecs>
TANDEM_INLINE void score_rows(const typename Math::Word* k, std::int64_t k_stride,
                              const typename Math::Word* q, int depth, float* scores) {
  Vec acc[rows][vecs];
  for (auto& row : acc) {
    for (Vec& a : row) a = zero();
  }
  multiply_tile<Math, rows, vecs>(acc, k, k_stride, 1, q, stripe_lanes, depth);
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vecs; ++v) store(acc[r][v], scores + r * stripe_lanes + v * vec_lanes);
  }
}

/// S^T = K Q^T for `count` keys.
template <typename Math, int vecs>
[[gnu::noinline]] void score(const typename Math::Word* k, std::int64_t k_stride, int count,
                             const typename Math::Word* q, int depth, float* scores, Ahead& ahead) {
  constexpr int rows = tile_rows(vecs);
  int j = 0;
  for (; j + rows <= count; j += rows) {
    ahead.fetch(rows);
    score_rows<Math, rows, vecs>(k + j * k_stride, k_stride, q, depth, scores + j * stripe_lanes);
  }
  for (; j < count; ++j) {
    score_rows<Math, 1, vecs>(k + j * k_stride, k_stride, q, depth, scores + j * stripe_lanes);
  }
}

template <typename Math, int rows, int vecs>
TANDEM_INLINE void accumulate_rows(const typename Math::Word* v, std::int64_t v_stride,
                                   const typename Math::Word* p, int depth, float* out) {
  Vec acc[rows][vecs];
  for (auto& row : acc) {
    for (Vec& a : row) a = zero();
  }
  multiply_tile<Math, rows, vecs>(acc, v, 1, v_stride, p, stripe_lanes, depth);
  for (int r = 0; r < rows; ++r) {
    for (int i = 0; i < vecs; ++i) {
      float* const sum = out + r * stripe_lanes + i * vec_lanes;
      store(hn::Add(load(sum), acc[r][i]), sum);
    }
  }
}

/// O^T += V^T P^T over `depth` words of keys, for `dims` columns of V. The block has a sum of its own, which
/// is then added (lane_totals.hpp says why).
template <typename Math, int vecs>
[[gnu::noinline]] void accumulate(const typename Math::Word* v, std::int64_t v_stride, int dims,
                                  const typename Math::Word* p, int depth, float* out) {
  constexpr int rows = tile_rows(vecs);
  int c = 0;
  for (; c + rows <= dims; c += rows) {
    accumulate_rows<Math, rows, vecs>(v + c, v_stride, p, depth, out + c * stripe_lanes);
  }
  for (; c < dims; ++c) accumulate_rows<Math, 1, vecs>(v + c, v_stride, p, depth, out + c * stripe_lanes);
}

/// Calls f with the number of registers as a constant.
template <typename Function>
TANDEM_INLINE void with_vecs(int vecs, Function f) {
  switch (vecs) {
    case 1: f.template operator()<1>(); break;
    case 2: f.template operator()<2>(); break;
    case 3: f.template operator()<3>(); break;
    default: f.template operator()<stripe_vecs>(); break;
  }
}

/// One block of keys against one stripe of queries.
template <typename Math>
void attend(const Block<Math>& b, const Stripe<Math>& s, const ForwardTile& t, const Logits& logits,
            float* scores, Ahead& ahead) {
  if (b.begin >= s.end || b.begin + b.count <= s.begin) return;
  LaneKeys keys[stripe_vecs];
  Segment segments[max_block_k / vec_lanes];
  int segment_count = 1;
  if (b.begin >= s.all_begin && b.begin + b.count <= s.all_end) {
    for (int v = 0; v < s.vecs; ++v) keys[v] = all_keys(b.count);
    segments[0] = {.begin = 0, .end = b.count, .first_vec = 0, .last_vec = s.vecs};
  } else {
    for (int v = 0; v < s.vecs; ++v) keys[v] = lane_keys(s, b, v);
    segment_count = cut_segments(keys, s.vecs, b.count, segments);
  }

  constexpr int epw = Math::elements_per_word;
  for (int i = 0; i < segment_count; ++i) {
    const Segment& g = segments[i];
    with_vecs(g.last_vec - g.first_vec, [&]<int vecs>() {
      score<Math, vecs>(b.k + g.begin * b.k_stride, b.k_stride, g.end - g.begin,
                        s.q + g.first_vec * vec_lanes, t.head_dim_qk / epw,
                        scores + g.begin * stripe_lanes + g.first_vec * vec_lanes, ahead);
    });
  }
  for (int v = 0; v < s.vecs; ++v) {
    if (keys[v].begin < keys[v].end) soften(s, v, keys[v], logits, t.head_dim_v, scores);
  }
  const auto* p = reinterpret_cast<const typename Math::Word*>(scores);
  for (int i = 0; i < segment_count; ++i) {
    const Segment& g = segments[i];
    with_vecs(g.last_vec - g.first_vec, [&]<int vecs>() {
      accumulate<Math, vecs>(b.v + g.begin / epw * b.v_stride, b.v_stride, t.head_dim_v,
                             p + g.begin / epw * stripe_lanes + g.first_vec * vec_lanes,
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
    transpose(rows, words, vec_lanes, words, reinterpret_cast<float*>(q) + lane, stripe_lanes);
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

/// O and LSE of one stripe, out of the lanes.
template <typename Math, typename T, typename K, typename Out>
void write_rows(const ForwardTile& t, std::int64_t first, const Stripe<Math>& s, const Logits& logits,
                float* rows) {
  std::int64_t row = first / t.group;
  std::int64_t head = first % t.group;
  for (int lane = 0; lane < s.count; lane += vec_lanes) {
    transpose(s.out + lane, stripe_lanes, t.head_dim_v, vec_lanes, rows, t.head_dim_v);
    for (int i = 0; i < vec_lanes && lane + i < s.count; ++i) {
      const std::int64_t keys = s.last_key[lane + i] - s.first_key[lane + i];
      if (keys == 1 && t.sink == nullptr) {
        write_one_key_row<T, K, Out>(t, row, head, s.first_key[lane + i]);
      } else {
        const RowSum sum{.top = logit_of_base(s.maximum[lane + i], logits), .sum = s.sum[lane + i]};
        write_row<Out>(t, row, head, keys > 0, sum, rows + i * t.head_dim_v);
      }
      if (++head == t.group) {
        head = 0;
        ++row;
      }
    }
  }
}

template <typename Math>
void fold(const Stripe<Math>& s, int dims, const Logits& logits) {
  fold_run<stripe_lanes>(s.totals, dims, s.out, s.sum, s.maximum, [&](Vec old, Vec now) {
    return exponent_between(base_of(old, logits), base_of(now, logits), logits);
  });
}

/// `T` is q's type, `K` that of k and v.
template <typename Math, typename T, typename K>
void run_tile(const ForwardTile& t) {
  const ForwardScratch layout = forward_scratch(t.block_q, t.block_k, t.head_dim_qk, t.head_dim_v);
  const auto floats = [&](std::size_t offset) { return reinterpret_cast<float*>(t.scratch + offset); };
  float* const rows = floats(layout.rows);
  float* const scores = floats(layout.scores);

  const Logits logits = logits_of(t);

  Stripe<Math> stripes[max_stripes];
  int stripe_count = 0;
  std::int64_t begin = t.seqlen_k;
  std::int64_t end = 0;
  for (int lane = 0; lane < t.count; lane += stripe_lanes) {
    Stripe<Math>& s = stripes[stripe_count++];
    s.count = t.count - lane < stripe_lanes ? t.count - lane : stripe_lanes;
    s.vecs = (s.count + vec_lanes - 1) / vec_lanes;
    s.q = reinterpret_cast<typename Math::Word*>(t.scratch + layout.q) +
          static_cast<std::int64_t>(lane) * t.head_dim_qk;
    s.out = floats(layout.out) + static_cast<std::int64_t>(lane) * t.head_dim_v;
    s.maximum = floats(layout.maximum) + lane;
    s.sum = floats(layout.sum) + lane;
    s.first_key = reinterpret_cast<std::int64_t*>(t.scratch + layout.first_key) + lane;
    s.last_key = reinterpret_cast<std::int64_t*>(t.scratch + layout.last_key) + lane;
    bound_keys(t, t.first + lane, s);
    if (s.begin < begin) begin = s.begin;
    if (s.end > end) end = s.end;
    pack_queries<Math, T>(t, t.first + lane, s.count, logits.sign, rows, s.q);
    for (int i = 0; i < stripe_lanes; ++i) {
      s.maximum[i] = negative_infinity;
      s.sum[i] = 0.0F;
    }
    __builtin_memset(s.out, 0, static_cast<std::size_t>(t.head_dim_v) * stripe_lanes * sizeof(float));
  }

  // Sums of rows that see no more than one run have the same bits either way.
  const bool in_runs = begin < end && begin / run_keys != (end - 1) / run_keys;
  for (int i = 0; in_runs && i < stripe_count; ++i) {
    stripes[i].totals = totals_at(t.scratch + layout.totals, t.block_q, i * stripe_lanes, t.head_dim_v);
    open_totals<stripe_lanes>(stripes[i].totals, t.head_dim_v);
  }

  // Blocks start at multiples of block_k: how rows are grouped into tiles changes no bit of their results.
  for (std::int64_t key = begin / t.block_k * t.block_k; key < end; key += t.block_k) {
    const int count = end - key < t.block_k ? static_cast<int>(end - key) : t.block_k;
    const Block<Math> block = stage<Math, K>(t, layout, key, count);
    Ahead ahead;
    if (end - key - count > 0) {
      const std::int64_t left = end - key - count;
      const KeyRun<K> run = key_run<K>(t, key + count, left < t.block_k ? static_cast<int>(left) : t.block_k);
      ahead = {.k = reinterpret_cast<const char*>(run.k),
               .v = reinterpret_cast<const char*>(run.v),
               .k_stride = t.k_stride * static_cast<std::int64_t>(sizeof(K)),
               .v_stride = t.v_stride * static_cast<std::int64_t>(sizeof(K)),
               .k_bytes = t.head_dim_qk * static_cast<int>(sizeof(K)),
               .v_bytes = t.head_dim_v * static_cast<int>(sizeof(K)),
               .rows = run.count};
    }
    for (int i = 0; i < stripe_count; ++i) attend(block, stripes[i], t, logits, scores, ahead);
    const bool run_ends = key / run_keys != (key + t.block_k) / run_keys || key + t.block_k >= end;
    for (int i = 0; in_runs && run_ends && i < stripe_count; ++i) fold(stripes[i], t.head_dim_v, logits);
    if (run_ends && t.stop()) return;
  }
  for (int i = 0; in_runs && i < stripe_count; ++i) {
    close_totals<stripe_lanes>(stripes[i].totals, t.head_dim_v, stripes[i].out, stripes[i].sum);
  }

  for (int i = 0; i < stripe_count; ++i) {
    const std::int64_t first = t.first + static_cast<std::int64_t>(i) * stripe_lanes;
    switch (t.out_dtype) {
      case DType::f16: write_rows<Math, T, K, f16>(t, first, stripes[i], logits, rows); break;
      case DType::bf16: write_rows<Math, T, K, bf16>(t, first, stripes[i], logits, rows); break;
      default: write_rows<Math, T, K, float>(t, first, stripes[i], logits, rows); break;
    }
  }
}

template <typename Math, typename T>
void run_with_keys(const ForwardTile& t) {
  switch (t.key_dtype == t.dtype ? DType::f32 : t.key_dtype) {
    case DType::e4m3: run_tile<Math, T, e4m3>(t); break;
    case DType::s8: run_tile<Math, T, s8>(t); break;
    default: run_tile<Math, T, T>(t); break;
  }
}

void run(const ForwardTile& t) {
  switch (t.dtype) {
    case DType::f16: run_with_keys<F32Math, f16>(t); break;
    case DType::e4m3: run_tile<F32Math, e4m3, e4m3>(t); break;
    case DType::bf16:
#if defined(__AVX512BF16__)
      if (t.head_dim_qk % 2 == 0) {
        run_with_keys<Bf16Math, bf16>(t);
        break;
      }
#endif
      run_with_keys<F32Math, bf16>(t);
      break;
    default: run_with_keys<F32Math, float>(t); break;
  }
}

}  // namespace

extern const ForwardKernel forward_kernel;
const ForwardKernel forward_kernel{.stripe = stripe_lanes, .run = run};

}  // namespace tandem::cpu::TANDEM_TARGET
