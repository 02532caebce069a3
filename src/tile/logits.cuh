// What scores go through between the tensor cores and the mask, in every kernel: scale and softcap.
#pragma once

#include "ops/forward/config.hpp"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/fragment.cuh"
#include "tile/row_scales.cuh"
#include "tile/select.cuh"
#include "tile/softmax.cuh"
#include "tile/widen.cuh"

namespace tandem::tile {

/// Scales or caps the scores of the 16-bit forward kernel, where the exponent's multiply-add cannot do it.
/// The scale is the softmax's, times that of K where K has one.
template <ScoreTransform transform, int n>
TANDEM_DEVICE void transform_scores(float (&s)[n], const ScoreOptions& score) {
  if constexpr (transform == ScoreTransform::scaled) {
#pragma unroll
    for (int i = 0; i < n; ++i) s[i] *= score.scale;
  } else if constexpr (transform == ScoreTransform::softcap) {
    // cap * tanh(x) = cap * (1 - 2 / (1 + e^2x)): absolute error 1e-7 of the cap; tanh.approx leaves 5e-4.
    const float cap = score.softcap;
    const float inner = score.scale / cap * 2.0F * log2_e;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      s[i] = cap - 2.0F * cap * ptx::reciprocal(1.0F + ptx::exp2(s[i] * inner));
    }
  }
}

/// What the softmax multiplies such scores by, in the exponent to base 2.
template <ScoreTransform transform>
TANDEM_DEVICE float scale_log2_of(const ForwardParams& p) {
  return (transform == ScoreTransform::raw ? p.score.scale : 1.0F) * log2_e;
}

/// Caps the scores of the 8-bit forward kernel. In the exponent of tanh, `unit` multiplies the scores of a
/// row, and `shift` stands for K's mean, which was removed. The result is in units of the logarithm to base
/// 2, as `cap` is.
template <int n, int factors>
TANDEM_DEVICE void cap_scores(float (&s)[n], const float (&factor)[factors], const float (&shift)[2],
                              float cap) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int h = i / 2 % 2;
    const float power = ptx::exp2(ptx::fma(s[i], factor[h % factors], shift[h]));
    s[i] = cap - 2.0F * cap * ptx::reciprocal(1.0F + power);
  }
}

/// A capped score of the backward kernels, as a fraction of the cap, and the derivative of the capped score.
struct CappedScore {
  float fraction;
  float slope;
};
/// `inner` is 2 * scale * log2(e) / cap. tanh(x) = 1 - 2 r with r = 1 / (1 + e^2x), as the forward kernels
/// have it; its slope is 4 r (1 - r).
TANDEM_DEVICE CappedScore cap_score(float score, float inner) {
  const float r = ptx::reciprocal(1.0F + ptx::exp2(score * inner));
  return {1.0F - 2.0F * r, 4.0F * r * (1.0F - r)};
}

/// P of a raw score in the backward kernels, whose scale has the factor log2(e). Writes the derivative of the
/// transformed score where there is a transform.
template <ScoreTransform transform>
TANDEM_DEVICE float probability_of(float score, float lse_log2, float scale, const ScoreOptions& options,
                                   float& slope) {
  if constexpr (transform != ScoreTransform::softcap) return ptx::exp2(ptx::fma(score, scale, -lse_log2));
  const CappedScore capped = cap_score(score, 2.0F * scale / options.softcap);
  slope = capped.slope;
  return ptx::exp2(ptx::fma(capped.fraction, options.softcap * log2_e, -lse_log2));
}

/// What a score function takes in the backward kernels: the transformed score, and its derivative.
template <ScoreTransform transform>
TANDEM_DEVICE float transformed_score(float score, float scale, const ScoreOptions& options, float& slope) {
  if constexpr (transform != ScoreTransform::softcap) {
    slope = 1.0F;
    return score * scale;
  }
  const CappedScore capped = cap_score(score, 2.0F * log2_e * scale / options.softcap);
  slope = capped.slope;
  return options.softcap * capped.fraction;
}

/// A thread's scores of an unmasked block, element by element from global memory. They serve the rare block
/// whose exponentials have overflowed, after its K in shared memory has been released. `query` and `key` are
/// the sequence positions of the warpgroup's tile origin, `key_type` what K has in memory, with scales by row
/// or without.
template <Tiling T, KeySource keys = KeySource::rows, OperandType key_type = OperandType::input,
          bool row_scales = false, typename Params, int n>
TANDEM_DEVICE void load_scores(float (&s)[n], const Params& p, const TileIndex& t, int query, int key,
                               const FragmentPosition& position) {
  const auto pair = [](const u16* x, int i) { return ptx::load_global(reinterpret_cast<const u32*>(x) + i); };
  using Key = typename Select<key_type == OperandType::input, u16, u8>::type;
  const i64 head_k = key_head(p, t);
  const Key* k = static_cast<const Key*>(p.k_data) + head_k * p.k_stride.head;
  if constexpr (!in_pages(keys)) {
    k = static_cast<const Key*>(p.k_data) + key_batch<keys>(p, t) * p.k_stride.batch +
        head_k * p.k_stride.head + (key_row(t, key) + position.first_col) * p.k_stride.row;
  }
  const u16* q[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // Rows past the sequence's end are computed and not stored, so any row will do.
    const TileRow at = row_at<T>(p, t, query, position.row(h));
    const i64 row = t.begin_q + min(at.query, t.seqlen_q - 1);
    q[h] = static_cast<const u16*>(p.q_data) + (p.packed_q ? 0 : t.batch) * p.q_stride.batch +
           at.head * p.q_stride.head + row * p.q_stride.row;
  }
  // Registers cannot be indexed: each iteration shifts the scores by four and appends four.
#pragma unroll 1
  for (int j = 0; j < n / 4; ++j) {
#pragma unroll
    for (int i = 0; i < n - 4; ++i) s[i] = s[i + 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n - 4 + i] = 0.0F;
    const Key* rows[2];
    if constexpr (in_pages(keys)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int at = key + position.first_col + 8 * j + i;
        if constexpr (keys == KeySource::padded_pages) at += t.begin_k;
        const int number = at / p.pages.page_size;
        // The block has no mask, so that every key of it has an entry in the table.
        const int page = page_at(p.pages, t.batch, number);
        rows[i] = page < 0 ? nullptr
                           : k + page * p.k_stride.batch + (at - number * p.pages.page_size) * p.k_stride.row;
      }
    }
#pragma unroll 1
    for (int d = 0; d < p.head_dim_qk / 2; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 x = pair(q[i / 2], d);
        const Key* const row = in_pages(keys) ? rows[i % 2] : k + (8 * j + i % 2) * p.k_stride.row;
        const bool exists = !in_pages(keys) || row != nullptr;
        if constexpr (key_type == OperandType::input) {
          const u32 y = exists ? pair(row, d) : 0U;
          s[n - 4 + i] = ptx::fma(unpack_low<T.element>(x), unpack_low<T.element>(y), s[n - 4 + i]);
          s[n - 4 + i] = ptx::fma(unpack_high<T.element>(x), unpack_high<T.element>(y), s[n - 4 + i]);
        } else {
          const u16 y = exists ? ptx::load_global(reinterpret_cast<const u16*>(row) + d) : u16{0};
          float low;
          float high;
          widen_two<key_type>(low, high, y, 0);
          s[n - 4 + i] = ptx::fma(unpack_low<T.element>(x), low, s[n - 4 + i]);
          s[n - 4 + i] = ptx::fma(unpack_high<T.element>(x), high, s[n - 4 + i]);
        }
      }
    }
    if constexpr (row_scales) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n - 4 + i] *= row_scale<keys>(p.k_row_scale, p, t, key + position.first_col + 8 * j + i % 2);
      }
    }
  }
}

}  // namespace tandem::tile
