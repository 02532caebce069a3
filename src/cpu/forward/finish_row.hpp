// The two ends of a query row that every forward kernel shares: which keys it sees, and what becomes of its
// sums.
#pragma once

#include "cpu/forward/tile.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/simd/stage.hpp"

namespace tandem::cpu::TANDEM_TARGET {

constexpr float negative_infinity = -__builtin_inff();

/// Keys [begin, end) of the sequence.
struct RowKeys {
  std::int64_t begin;
  std::int64_t end;
};

/// tandem::visible_keys for kernels.
TANDEM_INLINE RowKeys row_keys(const ForwardTile& t, std::int64_t row) {
  const std::int64_t diagonal = row + t.seqlen_k - t.seqlen_q;
  const std::int64_t begin = t.window_left >= 0 ? diagonal - t.window_left : 0;
  const std::int64_t end = t.window_right >= 0 ? diagonal + t.window_right + 1 : t.seqlen_k;
  return {begin > 0 ? begin : 0, end < t.seqlen_k ? end : t.seqlen_k};
}

/// A row's exponentials: their sum, and the logit that it and O are relative to.
struct RowSum {
  double top;
  float sum;
  float max_logit;  ///< the largest logit; read where max_logits are asked for
};

/// What becomes of a row once every key has been seen.
struct Finish {
  float scale;        ///< what O must be multiplied by
  double top;         ///< the largest of the logits and the sink
  float denominator;  ///< the softmax's, relative to top
};

/// e^(logit - top).
TANDEM_INLINE float weight_of(double logit, double top) {
  return logit == top ? 1.0F : static_cast<float>(__builtin_exp(logit - top));
}

TANDEM_INLINE Finish finish_row(const RowSum& row, const float* sink, float v_scale) {
  if (sink == nullptr) return {v_scale / row.sum, row.top, row.sum};
  const double logit = *sink;
  const double top = logit > row.top ? logit : row.top;
  const float weight = weight_of(row.top, top);
  const float denominator = row.sum * weight + weight_of(logit, top);
  return {weight * v_scale / denominator, top, denominator};
}

TANDEM_INLINE float row_lse(const Finish& f) {
  // Only logits that are all -inf leave 0: their softmax is 0 / 0.
  if (f.denominator == 0.0F) return __builtin_nanf("");
  return static_cast<float>(f.top + __builtin_log(f.denominator));
}

/// Writes a row's number into the LSE or max_logits, where it is asked for.
TANDEM_INLINE void write_number(const GroupRows& to, std::int64_t row, std::int64_t head, float number) {
  if (to.data != nullptr) static_cast<float*>(to.data)[row * to.row_stride + head * to.head_stride] = number;
}

/// Writes LSE and largest logit of one row and returns what its O must be multiplied by. `seen`: it sees a
/// key. Without one the LSE is what is left of its formula: the sink's logit, or -inf.
TANDEM_INLINE float close_row(const ForwardTile& t, std::int64_t row, std::int64_t head, bool seen,
                              const RowSum& sum) {
  const float* sink = t.sink != nullptr ? t.sink + head * t.sink_stride : nullptr;
  const Finish f = seen ? finish_row(sum, sink, t.v_scale) : Finish{};
  if (t.lse.data == nullptr && t.max_logits.data == nullptr) return f.scale;
  const float lse = seen ? row_lse(f) : (sink != nullptr ? *sink : negative_infinity);
  write_number(t.lse, row, head, lse);
  write_number(t.max_logits, row, head, !seen ? negative_infinity : lse == lse ? sum.max_logit : lse);
  return f.scale;
}

template <typename Out>
TANDEM_INLINE Out* out_row(const ForwardTile& t, std::int64_t row, std::int64_t head) {
  return static_cast<Out*>(t.out.data) + row * t.out.row_stride + head * t.out.head_stride;
}

/// dst[c] = factor * src[c] * sigmoid(gate[c]).
template <typename From, typename Gate, typename Out>
[[gnu::noinline]] void gate_row(const From* src, const Gate* gate, int columns, float factor, Out* dst) {
  const Vec f = broadcast(factor);
  const auto gated = [&](Vec x, Vec g) {
    const Vec power = exp2(hn::Mul(g, broadcast(-log2_e)));
    return hn::Div(hn::Mul(x, f), hn::Add(power, broadcast(1.0F)));
  };
  int c = 0;
  for (; c + vec_lanes <= columns; c += vec_lanes) store(gated(load(src + c), load(gate + c)), dst + c);
  if (c == columns) return;
  store_first(gated(load_first(src + c, columns - c), load_first(gate + c, columns - c)), dst + c,
              columns - c);
}

/// Writes `factor` times a row to out, behind its gate where the call has one.
template <typename From, typename Out>
TANDEM_INLINE void write_out(const ForwardTile& t, std::int64_t row, std::int64_t head, const From* src,
                             float factor) {
  Out* const out = out_row<Out>(t, row, head);
  if (t.gate.data == nullptr) return scale_row(src, t.head_dim_v, factor, out);
  const auto gate = [&]<typename T>() {
    const T* const rows = static_cast<const T*>(t.gate.data);
    gate_row(src, rows + row * t.gate.row_stride + head * t.gate.head_stride, t.head_dim_v, factor, out);
  };
  switch (t.dtype) {
    case DType::f16: return gate.template operator()<f16>();
    case DType::bf16: return gate.template operator()<bf16>();
    default: return gate.template operator()<float>();
  }
}

/// Writes out, LSE and largest logit of one row, whose unnormalised O is `accumulated`.
template <typename Out>
TANDEM_INLINE void write_row(const ForwardTile& t, std::int64_t row, std::int64_t head, bool seen,
                             const RowSum& sum, const float* accumulated) {
  const float scale = close_row(t, row, head, seen, sum);
  if (seen) {
    write_out<float, Out>(t, row, head, accumulated, scale);
  } else {  // 0 whatever was accumulated: a NaN in V reaches every row of a block
    __builtin_memset(out_row<Out>(t, row, head), 0, static_cast<std::size_t>(t.head_dim_v) * sizeof(Out));
  }
}

/// Calls f<Out> with the type of out.
template <typename Function>
TANDEM_INLINE void with_out_type(const ForwardTile& t, const Function& f) {
  switch (t.out_dtype) {
    case DType::f16: return f.template operator()<f16>();
    case DType::bf16: return f.template operator()<bf16>();
    default: return f.template operator()<float>();
  }
}

/// Calls f<K> with the type of k and v, which may be 8 bits under queries `T`.
template <typename T, typename Function>
TANDEM_INLINE void with_key_type(const ForwardTile& t, const Function& f) {
  switch (t.key_dtype == t.dtype ? DType::f32 : t.key_dtype) {
    case DType::e4m3: return f.template operator()<e4m3>();
    case DType::s8: return f.template operator()<s8>();
    default: return f.template operator()<T>();
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
