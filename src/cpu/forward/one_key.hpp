// Rows that see one key: P is 1 there, so that out is that key's v and dS is 0, bit for bit.
//
// That takes the same bits on both ways. The LSE is the logit as the backward pass computes it, rounding by
// rounding; delta is computed as dP is. The kernels' usual sums have other orders of addition.
#pragma once

#include "cpu/forward/finish_row.hpp"
#include "cpu/forward/key_rows.hpp"
#include "cpu/simd/dot.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/simd/stage.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// a . b as the matrix unit adds it up: of 32 columns even and odd ones apart.
template <typename T, typename K>
[[gnu::noinline]] float tiled_dot(const T* a, const K* b, int columns) {
  float sum = 0.0F;
  for (int c = 0; c < columns; c += 32) {
    float sums[2] = {0.0F, 0.0F};
    for (int i = 0; i < 32 && c + i < columns; ++i) {
      const float of_b = to_f32(from_f32<T>(to_f32(b[c + i])));
      sums[i % 2] = __builtin_fmaf(to_f32(a[c + i]), of_b, sums[i % 2]);
    }
    sum += sums[0] + sums[1];
  }
  return sum;
}

/// a . b as the backward pass's products add it up: one term, or one pair of bf16, after the other, or as the
/// matrix unit does, which takes subnormal numbers for 0. 8-bit values b have the bits that they would have
/// in a's type.
template <typename T, typename K>
TANDEM_INLINE float chained_dot(const T* a, const K* b, int columns) {
#if defined(TANDEM_MATRIX_UNIT)
  if constexpr (__is_same(T, bf16)) {
    const unsigned kept = _mm_getcsr();
    _mm_setcsr(kept | 0x8040U);  // DAZ and FTZ
    const float tiled = tiled_dot(a, b, columns);
    _mm_setcsr(kept);
    return tiled;
  }
#endif
  Vec sum = zero();
  if constexpr (has_bf16_dot && __is_same(T, bf16)) {
    for (int c = 0; c < columns; c += 2) {
      std::uint32_t words[2] = {0, 0};
      const unsigned long bytes = c + 1 < columns ? 4 : 2;
      __builtin_memcpy(&words[0], a + c, bytes);
      if constexpr (__is_same(K, T)) {
        __builtin_memcpy(&words[1], b + c, bytes);
      } else {
        const T pair[2] = {from_f32<T>(to_f32(b[c])), from_f32<T>(c + 1 < columns ? to_f32(b[c + 1]) : 0.0F)};
        __builtin_memcpy(&words[1], pair, sizeof pair);
      }
      sum = dot_bf16(sum, hn::Set(u32_lanes, words[0]), hn::Set(u32_lanes, words[1]));
    }
  } else {
    for (int c = 0; c < columns; ++c) {
      sum = hn::MulAdd(broadcast(to_f32(a[c])), broadcast(to_f32(b[c])), sum);
    }
  }
  return hn::GetLane(sum);
}

/// Out, LSE and largest logit of a row that sees `key` alone, without a sink.
template <typename T, typename K, typename Out>
void write_one_key_row(const ForwardTile& t, std::int64_t row, std::int64_t head, std::int64_t key) {
  const T* q = static_cast<const T*>(t.q.data) + row * t.q.row_stride + head * t.q.head_stride;
  const KeyRun<K> at = key_run<K>(t, key, 1);
  float product = chained_dot(q, at.k, t.head_dim_qk);
  float v_scale = t.v_scale;
  float of_row = 1.0F;
  if (t.k_scales.data != nullptr) {
    gather_scales(t, t.k_scales, key, 1, &of_row);
    product *= of_row;
  }
  if (t.v_scales.data != nullptr) {
    gather_scales(t, t.v_scales, key, 1, &of_row);
    v_scale *= of_row;
  }
  const float lse = hn::GetLane(SlopedLogits(t).logit(broadcast(product)));
  // The softmax of an infinite logit is 0 / 0 or infinity / infinity.
  const bool finite = __builtin_fabsf(lse) < __builtin_inff();
  write_out<K, Out>(t, row, head, at.v, finite ? v_scale : __builtin_nanf(""));
  for (const GroupRows& to : {t.lse, t.max_logits}) {
    write_number(to, row, head, finite ? lse : __builtin_nanf(""));
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
