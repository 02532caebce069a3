// One tile of queries in 8 bits: blocked online softmax with the roundings of the GPU kernels, query rows in
// the lanes.
//
// Codes are computed with as f32. That is exact where it has to be: an s8 product over at most 256 channels
// is below 127^2 * 256 = 4129024 and a u8 x s8 product over quant_block keys below 255 * 127 * 128 = 4145280,
// whole numbers under 2^24 that every order of addition gives exactly, so they are the 32-bit sums of the
// integer tensor cores. e4m3 products are exact in f32 too; their accumulator is truncated after every
// e4m3_depth_step of them.
//
// Compiled once for each instruction set (targets.cmake).
#include "cpu/finish_row.hpp"
#include "cpu/lane_totals.hpp"
#include "cpu/quantized_tile.hpp"
#include "cpu/simd/product.hpp"
#include "cpu/simd/rotate.hpp"
#include "cpu/simd/round.hpp"

namespace tandem::cpu::TANDEM_TARGET {

extern const QuantizeKernel quantize_kernel;

namespace {

constexpr int stripe_vecs = vec_registers == 32 ? 4 : 2;
constexpr int stripe_lanes = stripe_vecs * vec_lanes;
static_assert(quant_block % stripe_lanes == 0 && stripe_lanes <= 64);

/// The tile's scratch memory, taken apart.
struct Scratch {
  float *q, *out, *held, *scores, *k, *v;
  std::uint8_t* codes;
  float *v_unit, *v_ratio;                 ///< by channel of V
  float *q_scale, *shift, *maximum, *sum;  ///< by query row
  float *growth, *pending, *factor;        ///< by query row
  std::byte* totals;                       ///< of runs of keys
};

struct Work {
  const QuantizedTile& job;
  const ForwardTile& t;
  Scratch s;
  bool truncates;  ///< products are e4m3's
  /// P's unit is a maximum that follows the running one when it is too far above; else its largest in the
  /// tile.
  bool lazy_rescaling;
  bool p_linear;  ///< half of its exponentials are
};

/// Which keys the rows of one stripe see.
struct Stripe {
  int index;
  int count;
  std::int64_t first[stripe_lanes];
  std::int64_t last[stripe_lanes];
};

/// Keys [begin, begin + count); the products of [.., held until a promotion ..].
struct KeyBlock {
  std::int64_t begin;
  int count;
  bool opens;   ///< nothing is held yet
  bool closes;  ///< what is held is promoted now
};

TANDEM_INLINE Vec truncate(Vec x) {
  return bits_as_f32(hn::And(f32_as_bits(x), hn::Set(u32_lanes, e4m3_accumulator_mask)));
}

template <int rows>
TANDEM_INLINE void multiply(Vec (&acc)[rows][stripe_vecs], const float* words, std::int64_t row_stride,
                            std::int64_t depth_stride, const float* lanes, int depth, bool truncates) {
  const int step = truncates ? e4m3_depth_step : depth;
  for (int c = 0; c < depth; c += step) {
    const int n = depth - c < step ? depth - c : step;
    multiply_tile<F32Math, rows, stripe_vecs>(acc, words + c * depth_stride, row_stride, depth_stride,
                                              lanes + c * stripe_lanes, stripe_lanes, n);
    if (!truncates) continue;
    for (auto& row : acc) {
      for (Vec& a : row) a = truncate(a);
    }
  }
}

template <int rows>
TANDEM_INLINE void score_rows(const Work& w, const float* q, int key) {
  Vec acc[rows][stripe_vecs];
  for (auto& row : acc) {
    for (Vec& a : row) a = zero();
  }
  const int dim = w.t.head_dim_qk;
  multiply<rows>(acc, w.s.k + static_cast<std::int64_t>(key) * dim, dim, 1, q, dim, w.truncates);
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < stripe_vecs; ++v) {
      store(acc[r][v], w.s.scores + (key + r) * stripe_lanes + v * vec_lanes);
    }
  }
}

/// S^T = K Q^T, sums of codes.
[[gnu::noinline]] void score(const Work& w, const float* q, int count) {
  int j = 0;
  for (; j + 4 <= count; j += 4) score_rows<4>(w, q, j);
  for (; j < count; ++j) score_rows<1>(w, q, j);
}

/// P, times its range, as the second product takes it.
TANDEM_INLINE Vec round_p(const Work& w, Vec x) {
  switch (w.job.recipe.pv) {
    case Codes::e4m3: return round_to_e4m3(x);
    case Codes::s8: return round_whole(x);
    default: return w.t.dtype == DType::f16 ? round_to_f16(x) : round_to_bf16_value(x);
  }
}

/// 2^x, linear within an octave where P in its range is.
TANDEM_INLINE Vec linear_p(Vec x) {
  return hn::Mul(linear_exp2(hn::Add(x, broadcast(e4m3_lazy_p_range_log2))),
                 broadcast(1.0F / e4m3_lazy_p_range));
}

/// A row's scale, which makes all its logits NaN if it is marked.
TANDEM_INLINE float scale_of_row(float scale) {
  return __builtin_signbit(scale) != 0 ? __builtin_nanf("") : scale;
}

/// Sums of codes to logits times log2(e), in place; returns the largest by lane.
TANDEM_INLINE Vec finish_logits(const Work& w, const Stripe& stripe, const KeyBlock& b, int lane,
                                bool masked) {
  const ForwardTile& t = w.t;
  const int row = stripe.index * stripe_lanes + lane;
  const Vec q_scale = load(w.s.q_scale + row);
  const Vec shift = load(w.s.shift + row);
  std::int32_t first[vec_lanes];
  std::int32_t last[vec_lanes];
  for (int i = 0; i < vec_lanes; ++i) {
    const std::int64_t f = stripe.first[lane + i] - b.begin;
    const std::int64_t l = stripe.last[lane + i] - b.begin;
    first[i] = f < 0 ? 0 : (f > b.count ? b.count : static_cast<std::int32_t>(f));
    last[i] = l < 0 ? 0 : (l > b.count ? b.count : static_cast<std::int32_t>(l));
  }
  const IVec first_key = hn::LoadU(i32_lanes, first);
  const IVec last_key = hn::LoadU(i32_lanes, last);
  Vec maximum = broadcast(negative_infinity);
  for (int j = 0; j < b.count; ++j) {
    float* const at = w.s.scores + j * stripe_lanes + lane;
    Vec x = hn::Mul(load(at), hn::Mul(q_scale, broadcast(scale_of_row(w.job.k_scales[b.begin + j]))));
    if (t.softcap != 0.0F) {
      x = hn::Mul(tanh(hn::Mul(hn::Add(x, shift), broadcast(1.0F / t.softcap))),
                  broadcast(t.softcap * log2_e));
    }
    if (masked) {
      const IVec key = hn::Set(i32_lanes, j);
      const auto seen = hn::AndNot(hn::Lt(key, first_key), hn::Lt(key, last_key));
      x = hn::IfThenElse(hn::RebindMask(f32_lanes, seen), x, broadcast(negative_infinity));
    }
    store(x, at);
    maximum = hn::Max(x, maximum);
  }
  return maximum;
}

TANDEM_INLINE Vec zero_if_infinite(Vec maximum) {
  return hn::IfThenZeroElse(hn::Eq(maximum, broadcast(negative_infinity)), maximum);
}

/// Logits to rounded P in place, with the row's maximum, sum and factors brought up to date.
[[gnu::noinline]] void soften(const Work& w, const Stripe& stripe, const KeyBlock& b, int lane, bool masked) {
  const int row = stripe.index * stripe_lanes + lane;
  const Vec in_tile = finish_logits(w, stripe, b, lane, masked);
  const Vec old = load(w.s.maximum + row);
  const auto above = hn::Gt(in_tile, hn::Add(old, broadcast(w.lazy_rescaling ? lazy_headroom_log2 : 0.0F)));
  const Vec maximum = hn::IfThenElse(above, in_tile, old);
  const Vec safe = zero_if_infinite(maximum);
  const Vec growth = exp2(hn::Sub(old, safe));
  const Vec base = w.lazy_rescaling ? safe : zero_if_infinite(in_tile);
  const Vec weight = w.lazy_rescaling ? broadcast(1.0F) : exp2(hn::Sub(in_tile, safe));

  const bool by_row = w.job.recipe.v_scales == ScaleGroup::row && w.job.recipe.pv != Codes::input;
  const float range = w.job.recipe.pv == Codes::e4m3 ? (w.lazy_rescaling ? e4m3_lazy_p_range : e4m3_p_range)
                                                     : (w.job.recipe.pv == Codes::s8 ? u8_p_range : 1.0F);
  Vec sum = zero();
  Vec largest = zero();
  for (int j = 0; j < b.count; ++j) {
    float* const at = w.s.scores + j * stripe_lanes + lane;
    const Vec x = hn::Sub(load(at), base);
    const Vec p = w.p_linear && takes_linear_exp2(j) ? linear_p(x) : exp2(x);
    sum = hn::Add(sum, p);
    if (by_row) {  // V's scale joins P before it is rounded
      const Vec scaled = hn::Mul(p, broadcast(w.job.v_scales[b.begin + j]));
      largest = hn::Max(scaled, largest);
      store(scaled, at);
    } else {
      store(round_p(w, hn::Mul(p, broadcast(range))), at);
    }
  }
  Vec unit = broadcast(1.0F / range);
  if (by_row) {
    const auto some = hn::Gt(largest, zero());
    const Vec inverse = hn::IfThenElseZero(some, hn::Div(broadcast(range), largest));
    for (int j = 0; j < b.count; ++j) {
      float* const at = w.s.scores + j * stripe_lanes + lane;
      store(round_p(w, hn::Mul(load(at), inverse)), at);
    }
    unit = hn::Mul(unit, largest);
  }
  store(maximum, w.s.maximum + row);
  store(hn::MulAdd(load(w.s.sum + row), growth, hn::Mul(sum, weight)), w.s.sum + row);
  store(growth, w.s.growth + row);
  store(hn::Mul(load(w.s.pending + row), growth), w.s.pending + row);
  store(hn::Mul(unit, weight), w.s.factor + row);
}

template <int rows>
TANDEM_INLINE void accumulate_rows(const Work& w, const Stripe& stripe, const KeyBlock& b, int channel) {
  const std::int64_t at = (static_cast<std::int64_t>(stripe.index) * w.t.head_dim_v + channel) * stripe_lanes;
  const int row = stripe.index * stripe_lanes;
  Vec acc[rows][stripe_vecs];
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < stripe_vecs; ++v) {
      acc[r][v] = zero();
      if (b.opens) continue;
      const Vec ratio = hn::Mul(load(w.s.growth + row + v * vec_lanes), broadcast(w.s.v_ratio[channel + r]));
      acc[r][v] = hn::Mul(load(w.s.held + at + r * stripe_lanes + v * vec_lanes), ratio);
    }
  }
  multiply<rows>(acc, w.s.v + channel, 1, w.t.head_dim_v, w.s.scores, b.count, w.truncates);
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < stripe_vecs; ++v) {
      const std::int64_t lane = at + r * stripe_lanes + v * vec_lanes;
      if (!b.closes) {
        store(acc[r][v], w.s.held + lane);
        continue;
      }
      const Vec factor = hn::Mul(load(w.s.factor + row + v * vec_lanes), broadcast(w.s.v_unit[channel + r]));
      const Vec kept = hn::Mul(load(w.s.out + lane), load(w.s.pending + row + v * vec_lanes));
      store(hn::MulAdd(acc[r][v], factor, kept), w.s.out + lane);
    }
  }
}

/// O^T = O^T * growth + V^T P^T, by way of what the tensor cores hold.
[[gnu::noinline]] void accumulate(const Work& w, const Stripe& stripe, const KeyBlock& b) {
  int c = 0;
  for (; c + 4 <= w.t.head_dim_v; c += 4) accumulate_rows<4>(w, stripe, b, c);
  for (; c < w.t.head_dim_v; ++c) accumulate_rows<1>(w, stripe, b, c);
  if (!b.closes) return;
  for (int i = 0; i < stripe_lanes; ++i) w.s.pending[stripe.index * stripe_lanes + i] = 1.0F;
}

/// Codes as the whole numbers or e4m3 values they stand for.
TANDEM_INLINE void decode(Codes codes, const std::uint8_t* in, std::int64_t count, float* out) {
  if (codes == Codes::s8) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(static_cast<std::int8_t>(in[i]));
  } else {
    widen_rows(reinterpret_cast<const e4m3*>(in), count, 1, static_cast<int>(count), out, count);
  }
}

/// The scale of V by channel for this block, and what sums held in the last block's scale have to be
/// multiplied by.
void scale_channels(const Work& w, const KeyBlock& b) {
  const Recipe& r = w.job.recipe;
  const int dim = w.t.head_dim_v;
  for (int c = 0; c < dim; ++c) {
    float unit = 1.0F;
    if (r.pv != Codes::input && r.v_scales == ScaleGroup::channel) {
      unit = w.job.v_scales[b.begin / quant_block * dim + c];
    } else if (r.pv != Codes::input && r.v_scales != ScaleGroup::row) {
      unit = w.job.v_scales[b.begin];
    }
    const float before = b.opens ? 0.0F : w.s.v_unit[c];
    if (unit == 0.0F) unit = before;  // a block of zeros takes the scale that there is
    w.s.v_ratio[c] = before > 0.0F ? before / unit : 1.0F;
    w.s.v_unit[c] = unit;
  }
}

void stage(const Work& w, const KeyBlock& b) {
  const ForwardTile& t = w.t;
  const QuantizedTile& job = w.job;
  decode(job.recipe.qk, job.k_codes + b.begin * t.head_dim_qk,
         static_cast<std::int64_t>(b.count) * t.head_dim_qk, w.s.k);
  if (job.recipe.pv != Codes::input) {
    decode(job.recipe.pv, job.v_codes + b.begin * t.head_dim_v,
           static_cast<std::int64_t>(b.count) * t.head_dim_v, w.s.v);
  } else if (t.dtype == DType::f16) {
    widen_rows(static_cast<const f16*>(t.v) + b.begin * t.v_stride, t.v_stride, b.count, t.head_dim_v, w.s.v,
               t.head_dim_v);
  } else {
    widen_rows(static_cast<const bf16*>(t.v) + b.begin * t.v_stride, t.v_stride, b.count, t.head_dim_v, w.s.v,
               t.head_dim_v);
  }
  scale_channels(w, b);
}

/// scale * q . mean of each row: what removing K's mean takes off its logits.
void find_shifts(const Work& w) {
  const int dim = w.t.head_dim_qk;
  for (int i = 0; i < quant_block; ++i) w.s.shift[i] = 0.0F;
  if (w.job.mean == nullptr) return;
  for (int i = 0; i < w.t.count; ++i) {
    const std::int64_t at = (w.t.first + i) * w.t.q.row_stride;
    double sum = 0.0;
    for (int c = 0; c < dim; ++c) {
      const float q = w.t.dtype == DType::f16 ? to_f32(static_cast<const f16*>(w.t.q.data)[at + c])
                                              : to_f32(static_cast<const bf16*>(w.t.q.data)[at + c]);
      sum += static_cast<double>(q) * static_cast<double>(w.job.mean[c]);
    }
    w.s.shift[i] = static_cast<float>(sum * static_cast<double>(w.t.scale));
  }
}

/// Q's codes and scales as the caller brought them.
void take_queries(const Work& w) {
  const ForwardTile& t = w.t;
  for (int i = 0; i < t.count; ++i) {
    take_codes(static_cast<const std::uint8_t*>(t.q.data) + (t.first + i) * t.q.row_stride, w.job.recipe.qk,
               t.head_dim_qk, w.job.q_scales[i * w.job.q_scale_stride],
               w.s.codes + static_cast<std::int64_t>(i) * t.head_dim_qk, w.s.q_scale[i]);
  }
}

/// Q's codes and scales.
void quantize_queries(const Work& w) {
  const ForwardTile& t = w.t;
  const Recipe& r = w.job.recipe;
  const int dim = t.head_dim_qk;
  const auto item = static_cast<std::int64_t>(2);
  const QuantizeRows rows{.data = static_cast<const std::byte*>(t.q.data) + t.first * t.q.row_stride * item,
                          .dtype = t.dtype,
                          .stride = t.q.row_stride,
                          .rows = t.count,
                          .dim = dim,
                          .mean = nullptr,
                          .rotate = r.rotate_qk,
                          .scratch = w.s.k};
  quantize_kernel.quantize(rows, {.codes = r.qk,
                                  .group = r.qk_scales,
                                  .largest = w.job.q_largest,
                                  .out = w.s.codes,
                                  .out_stride = dim,
                                  .scales = w.s.q_scale,
                                  .nan_markers = true});
}

/// Q's codes into lanes, and its scales times the softmax's.
void stage_queries(const Work& w) {
  const ForwardTile& t = w.t;
  const Recipe& r = w.job.recipe;
  const int dim = t.head_dim_qk;
  if (w.job.q_scales != nullptr) {
    take_queries(w);
  } else {
    quantize_queries(w);
  }
  const float factor = t.softcap != 0.0F ? t.scale : t.scale * log2_e;
  for (int i = 0; i < quant_block; ++i)
    w.s.q_scale[i] = i < t.count ? scale_of_row(w.s.q_scale[i]) * factor : 0.0F;
  decode(r.qk, w.s.codes, static_cast<std::int64_t>(t.count) * dim, w.s.k);
  __builtin_memset(w.s.q, 0,
                   sizeof(float) * static_cast<std::size_t>(quant_block) * static_cast<std::size_t>(dim));
  for (int i = 0; i < t.count; ++i) {
    float* const lane =
        w.s.q + static_cast<std::int64_t>(i / stripe_lanes) * dim * stripe_lanes + i % stripe_lanes;
    for (int c = 0; c < dim; ++c)
      lane[static_cast<std::int64_t>(c) * stripe_lanes] = w.s.k[static_cast<std::int64_t>(i) * dim + c];
  }
}

Scratch take_apart(const ForwardTile& t) {
  const QuantizedScratch layout = quantized_scratch(t.head_dim_qk, t.head_dim_v);
  auto* const base = reinterpret_cast<float*>(t.scratch);
  Scratch s{};
  s.q = base + layout.q;
  s.out = base + layout.out;
  s.held = base + layout.held;
  s.scores = base + layout.scores;
  s.k = base + layout.k;
  s.v = base + layout.v;
  s.codes = reinterpret_cast<std::uint8_t*>(base + layout.codes);
  s.v_unit = base + layout.channels;
  s.v_ratio = s.v_unit + t.head_dim_v;
  float* rows = base + layout.rows;
  for (float** field : {&s.q_scale, &s.shift, &s.maximum, &s.sum, &s.growth, &s.pending, &s.factor}) {
    *field = rows;
    rows += quant_block;
  }
  s.totals = reinterpret_cast<std::byte*>(base + layout.totals);
  return s;
}

/// Every row's sums before the first block, and the keys it sees.
void open_stripes(const Work& w, Stripe* stripes, int count) {
  for (int i = 0; i < quant_block; ++i) {
    w.s.maximum[i] = negative_infinity;
    w.s.sum[i] = 0.0F;
    w.s.pending[i] = 1.0F;
  }
  __builtin_memset(
      w.s.out, 0,
      sizeof(float) * static_cast<std::size_t>(quant_block) * static_cast<std::size_t>(w.t.head_dim_v));
  for (int n = 0; n < count; ++n) {
    Stripe& s = stripes[n];
    s.index = n;
    s.count = w.t.count - n * stripe_lanes < stripe_lanes ? w.t.count - n * stripe_lanes : stripe_lanes;
    for (int i = 0; i < stripe_lanes; ++i) {
      s.first[i] = s.last[i] = 0;
      if (i >= s.count) continue;
      const RowKeys keys = row_keys(w.t, w.t.first + n * stripe_lanes + i);
      s.first[i] = keys.begin;
      s.last[i] = keys.end;
    }
  }
}

template <typename Out>
void write_stripe(const Work& w, const Stripe& s) {
  const int dim = w.t.head_dim_v;
  const float* out = w.s.out + static_cast<std::int64_t>(s.index) * dim * stripe_lanes;
  float* const row = w.s.k;
  for (int i = 0; i < s.count; ++i) {
    const int at = s.index * stripe_lanes + i;
    for (int c = 0; c < dim; ++c) row[c] = out[static_cast<std::int64_t>(c) * stripe_lanes + i];
    if (w.job.recipe.rotate_v) rotate_back(row, dim);
    const float shift = w.t.softcap != 0.0F ? 0.0F : w.s.shift[at] * log2_e;
    write_row<Out>(w.t, w.t.first + at, 0, s.first[i] < s.last[i], w.s.maximum[at] + shift, w.s.sum[at], row);
  }
}

/// One block of keys against one stripe of queries.
void attend(const Work& w, const Stripe& s, const KeyBlock& b) {
  bool masked = false;
  for (int i = 0; i < s.count; ++i) masked |= s.first[i] > b.begin || s.last[i] < b.begin + b.count;
  score(w, w.s.q + static_cast<std::int64_t>(s.index) * w.t.head_dim_qk * stripe_lanes, b.count);
  for (int lane = 0; lane < stripe_lanes; lane += vec_lanes) soften(w, s, b, lane, masked);
  accumulate(w, s, b);
}

/// Adds a run's sums to the totals; `last`: and takes these for the row's.
void fold(const Work& w, int stripe, bool last) {
  const int dim = w.t.head_dim_v;
  const int row = stripe * stripe_lanes;
  const LaneTotals totals = totals_at(w.s.totals, quant_block, row, dim);
  float* const out = w.s.out + static_cast<std::int64_t>(row) * dim;
  fold_run<stripe_lanes>(totals, dim, out, w.s.sum + row, w.s.maximum + row,
                         [](Vec old, Vec now) { return hn::Sub(old, now); });
  if (last) close_totals<stripe_lanes>(totals, dim, out, w.s.sum + row);
}

void run(const QuantizedTile& job) {
  const Recipe& r = job.recipe;
  const bool lags_in_e4m3 = r.pv == Codes::e4m3 && r.v_scales != ScaleGroup::row;
  const Work w{.job = job,
               .t = job.tile,
               .s = take_apart(job.tile),
               .truncates = r.qk == Codes::e4m3,
               .lazy_rescaling = r.pv == Codes::input || lags_in_e4m3,
               .p_linear = r.linear_exp2 && lags_in_e4m3};
  stage_queries(w);
  find_shifts(w);
  Stripe stripes[quant_block / stripe_lanes];
  const int count = (w.t.count + stripe_lanes - 1) / stripe_lanes;
  open_stripes(w, stripes, count);

  const std::int64_t begin = row_keys(w.t, w.t.first).begin / quant_block * quant_block;
  const std::int64_t end = row_keys(w.t, w.t.first + w.t.count - 1).end;
  const bool in_runs = begin < end && begin / run_keys != (end - 1) / run_keys;
  for (int n = 0; in_runs && n < count; ++n) {
    open_totals<stripe_lanes>(totals_at(w.s.totals, quant_block, n * stripe_lanes, w.t.head_dim_v),
                              w.t.head_dim_v);
  }
  int held = 0;
  std::int64_t run_begin = begin;
  for (std::int64_t key = begin; key < end; key += quant_block) {
    const int keys = end - key < quant_block ? static_cast<int>(end - key) : quant_block;
    const bool closes = held + 1 == r.promote_every || key + quant_block >= end;
    const KeyBlock b{.begin = key, .count = keys, .opens = held == 0, .closes = closes};
    held = closes ? 0 : held + 1;
    if (w.t.stop()) return;
    stage(w, b);
    for (int n = 0; n < count; ++n) attend(w, stripes[n], b);
    const bool last = key + quant_block >= end;
    if (!in_runs || !closes || (!last && key + quant_block - run_begin < run_keys)) continue;
    for (int n = 0; n < count; ++n) fold(w, n, last);
    run_begin = key + quant_block;
  }
  for (int n = 0; n < count; ++n) {
    switch (w.t.out_dtype) {
      case DType::f16: write_stripe<f16>(w, stripes[n]); break;
      case DType::bf16: write_stripe<bf16>(w, stripes[n]); break;
      default: write_stripe<float>(w, stripes[n]); break;
    }
  }
}

}  // namespace

extern const QuantizedKernel quantized_kernel;
const QuantizedKernel quantized_kernel{.run = run};

}  // namespace tandem::cpu::TANDEM_TARGET
