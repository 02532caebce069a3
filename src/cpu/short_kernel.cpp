// Few query rows against many keys, as in decoding: lanes would be mostly empty, so dot products run along
// head_dim.
//
// Keys are cut into splits whose size depends on the sequence alone; each leaves a partial result (maximum,
// sum, unnormalised O) and partial results are folded in order, whether one thread computed them or many. P
// stays in fp32. Partial results are in f64: a split adds a run of run_keys keys in f32, block by block, and
// its runs in f64 (lane_totals.hpp says why).
//
// Compiled once for each instruction set (targets.cmake).
#include "cpu/finish_row.hpp"
#include "cpu/forward_tile.hpp"
#include "cpu/logits.hpp"
#include "cpu/one_key.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/simd/stage.hpp"

namespace tandem::cpu::TANDEM_TARGET {
namespace {

/// Rows that share the loads of K and V, and keys that are scored together: 16 accumulators, 8 on 16
/// registers.
constexpr int rows_together = 4;
constexpr int keys_together = vec_registers == 32 ? 4 : 2;
/// Keys between two looks at the maximum.
constexpr int block_keys = short_block_k;
/// How many keys ahead rows of K and V are fetched.
constexpr int fetch_distance = 16;

constexpr int padded(int columns) {
  return (columns + vec_lanes - 1) / vec_lanes * vec_lanes;
}

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

template <typename T>
TANDEM_INLINE void fetch(const T* row, int columns) {
  const char* p = reinterpret_cast<const char*>(row);
  for (int i = 0; i < columns * static_cast<int>(sizeof(T)); i += 64) __builtin_prefetch(p + i, 0, 3);
}

/// scores[row][key] for `keys` keys and `rows` rows of q (f32, zero-padded to whole registers).
template <typename T, int rows, int keys>
TANDEM_INLINE void score_keys(const T* k, std::int64_t k_stride, const float* q, int columns, float* scores) {
  const int q_stride = padded(columns);
  Vec acc[rows][keys];
  for (auto& row : acc) {
    for (Vec& a : row) a = zero();
  }
  const auto step = [&](int c, auto load_key) {
    Vec key[keys];
#pragma GCC unroll 4
    for (int j = 0; j < keys; ++j) key[j] = load_key(k + j * k_stride + c);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const Vec query = load(q + r * q_stride + c);
#pragma GCC unroll 4
      for (int j = 0; j < keys; ++j) acc[r][j] = hn::MulAdd(query, key[j], acc[r][j]);
    }
  };
  int c = 0;
  for (; c + vec_lanes <= columns; c += vec_lanes) step(c, [](const T* p) { return load(p); });
  if (c < columns) step(c, [&](const T* p) { return load_first(p, columns - c); });
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < keys; ++j)
      scores[r * block_keys + j] = hn::GetLane(hn::SumOfLanes(f32_lanes, acc[r][j]));
  }
}

/// out[row] += sum over keys of p[row][key] * v[key], `vecs` registers of columns at a time.
template <typename T, int rows, int vecs>
TANDEM_INLINE void weigh_columns(const T* v, std::int64_t v_stride, int count, const float* p, float* out,
                                 int out_stride) {
  Vec acc[rows][vecs];
  for (auto& row : acc) {
    for (Vec& a : row) a = zero();
  }
  for (int j = 0; j < count; ++j) {
    Vec value[vecs];
#pragma GCC unroll 4
    for (int i = 0; i < vecs; ++i) value[i] = load(v + j * v_stride + i * vec_lanes);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const Vec weight = broadcast(p[r * block_keys + j]);
#pragma GCC unroll 4
      for (int i = 0; i < vecs; ++i) acc[r][i] = hn::MulAdd(weight, value[i], acc[r][i]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int i = 0; i < vecs; ++i) {
      float* const sum = out + r * out_stride + i * vec_lanes;
      store(hn::Add(load(sum), acc[r][i]), sum);
    }
  }
}

template <typename T, int rows>
TANDEM_INLINE void weigh(const T* v, std::int64_t v_stride, int count, const float* p, float* out,
                         int columns) {
  constexpr int vecs = keys_together;
  int c = 0;
  for (; c + vecs * vec_lanes <= columns; c += vecs * vec_lanes) {
    weigh_columns<T, rows, vecs>(v + c, v_stride, count, p, out + c, columns);
  }
  for (; c + vec_lanes <= columns; c += vec_lanes) {
    weigh_columns<T, rows, 1>(v + c, v_stride, count, p, out + c, columns);
  }
  for (; c < columns; ++c) {
    for (int r = 0; r < rows; ++r) {
      float sum = 0.0F;
      for (int j = 0; j < count; ++j) sum += p[r * block_keys + j] * to_f32(v[j * v_stride + c]);
      out[r * columns + c] += sum;
    }
  }
}

/// The softcap; `s` is padded to whole registers.
TANDEM_INLINE void cap_row(float* s, int count, const Logits& logits) {
  for (int j = 0; j < count; j += vec_lanes) {
    store(hn::Mul(tanh(hn::Mul(load(s + j), broadcast(logits.cap_in))), broadcast(logits.cap_out)), s + j);
  }
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

/// `rows` rows from `first` against keys [begin, begin + count), count <= block_keys.
template <typename T, int rows>
void attend_block(const ForwardTile& t, int first, std::int64_t begin, int count, const float* q,
                  const Logits& logits, const RunSums& state) {
  alignas(64) float scores[rows * block_keys];
  const T* k = static_cast<const T*>(t.k) + begin * t.k_stride;
  const T* v = static_cast<const T*>(t.v) + begin * t.v_stride;
  const float* row_q = q + static_cast<std::int64_t>(first) * padded(t.head_dim_qk);
  int j = 0;
  for (; j + keys_together <= count; j += keys_together) {
    for (int i = j; i < j + keys_together && i + fetch_distance < count; ++i) {
      fetch(k + (i + fetch_distance) * t.k_stride, t.head_dim_qk);
    }
    for (int i = j; i < j + keys_together; ++i) fetch(v + i * t.v_stride, t.head_dim_v);
    score_keys<T, rows, keys_together>(k + j * t.k_stride, t.k_stride, row_q, t.head_dim_qk, scores + j);
  }
  for (; j < count; ++j) {
    score_keys<T, rows, 1>(k + j * t.k_stride, t.k_stride, row_q, t.head_dim_qk, scores + j);
  }
  for (int r = 0; r < rows; ++r) {
    float* s = scores + r * block_keys;
    if (logits.cap_out != 0.0F) cap_row(s, count, logits);
    const RowKeys keys = row_keys(t, (t.first + first + r) / t.group);
    for (int i = 0; i < count && begin + i < keys.begin; ++i) s[i] = negative_infinity;
    for (int i = count; i > 0 && begin + i > keys.end; --i) s[i - 1] = negative_infinity;
    soften_row(s, count, logits.factor, state, first + r, t.head_dim_v);
  }
  weigh<T, rows>(v, t.v_stride, count, scores, state.out + static_cast<std::int64_t>(first) * t.head_dim_v,
                 t.head_dim_v);
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
  const auto factor = static_cast<double>(logits_of(t).factor);
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

template <typename T>
void attend(const ForwardTile& t, std::int64_t begin, std::int64_t end, double* partial) {
  const ForwardScratch layout = forward_scratch(t.block_q, t.block_k, t.head_dim_qk, t.head_dim_v);
  const PartialView<double> total = partial_at(partial, t.count);
  const RunSums state = partial_at(reinterpret_cast<float*>(t.scratch + layout.rows), t.count);
  clear(total, t.count, t.head_dim_v);
  clear(state, t.count, t.head_dim_v);

  const Logits logits = logits_of(t);
  auto* const q = reinterpret_cast<float*>(t.scratch + layout.q);
  const int q_stride = padded(t.head_dim_qk);
  for (int r = 0; r < t.count; ++r) {
    const std::int64_t row = (t.first + r) / t.group;
    const std::int64_t head = (t.first + r) % t.group;
    float* packed = q + static_cast<std::int64_t>(r) * q_stride;
    scale_row(static_cast<const T*>(t.q.data) + row * t.q.row_stride + head * t.q.head_stride, t.head_dim_qk,
              logits.sign, packed);
    for (int c = t.head_dim_qk; c < q_stride; ++c) packed[c] = 0.0F;
  }

  for (std::int64_t key = begin; key < end; key += block_keys) {
    const int count = end - key < block_keys ? static_cast<int>(end - key) : block_keys;
    for (int r = 0; r < t.count; r += rows_together) {
      switch (t.count - r) {
        case 1: attend_block<T, 1>(t, r, key, count, q, logits, state); break;
        case 2: attend_block<T, 2>(t, r, key, count, q, logits, state); break;
        case 3: attend_block<T, 3>(t, r, key, count, q, logits, state); break;
        default: attend_block<T, 4>(t, r, key, count, q, logits, state); break;
      }
    }
    if ((key - begin) / run_keys != (key + block_keys - begin) / run_keys || key + block_keys >= end) {
      fold(t, total, state);
      clear(state, t.count, t.head_dim_v);
    }
  }
}

void attend_short(const ForwardTile& t, std::int64_t begin, std::int64_t end, double* partial) {
  switch (t.dtype) {
    case DType::f16: attend<f16>(t, begin, end, partial); break;
    case DType::bf16: attend<bf16>(t, begin, end, partial); break;
    case DType::e4m3: attend<e4m3>(t, begin, end, partial); break;
    default: attend<float>(t, begin, end, partial); break;
  }
}

void fold_short(const ForwardTile& t, double* total, const double* next) {
  fold(t, partial_at(total, t.count), partial_at(next, t.count));
}

template <typename T, typename Out>
void write(const ForwardTile& t, const PartialView<const double>& total) {
  const float scale = logits_of(t).scale;
  const ForwardScratch layout = forward_scratch(t.block_q, t.block_k, t.head_dim_qk, t.head_dim_v);
  auto* const out = reinterpret_cast<float*>(t.scratch + layout.rows);
  for (int r = 0; r < t.count; ++r) {
    const std::int64_t row = (t.first + r) / t.group;
    const std::int64_t head = (t.first + r) % t.group;
    const RowKeys keys = row_keys(t, row);
    if (keys.end - keys.begin == 1 && t.sink == nullptr) {
      write_one_key_row<T, Out>(t, row, head, keys.begin);
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

template <typename T>
void finish(const ForwardTile& t, const PartialView<const double>& total) {
  switch (t.out_dtype) {
    case DType::f16: write<T, f16>(t, total); break;
    case DType::bf16: write<T, bf16>(t, total); break;
    default: write<T, float>(t, total); break;
  }
}

void finish_short(const ForwardTile& t, const double* total) {
  const PartialView<const double> state = partial_at(total, t.count);
  switch (t.dtype) {
    case DType::f16: finish<f16>(t, state); break;
    case DType::bf16: finish<bf16>(t, state); break;
    case DType::e4m3: finish<e4m3>(t, state); break;
    default: finish<float>(t, state); break;
  }
}

}  // namespace

extern const ShortKernel short_kernel;
const ShortKernel short_kernel{.attend = attend_short, .fold = fold_short, .finish = finish_short};

}  // namespace tandem::cpu::TANDEM_TARGET
