// A stripe's two ends: rows of Q into lanes, and O and LSE out of them.
#pragma once

#include "cpu/forward/ahead.hpp"
#include "cpu/forward/finish_row.hpp"
#include "cpu/forward/one_key.hpp"
#include "cpu/forward/stripe.hpp"
#include "cpu/simd/stage.hpp"

namespace tandem::cpu::TANDEM_TARGET {

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
      if (pairs && factor == 1.0F) {
        __builtin_memcpy(packed, source, static_cast<std::size_t>(words) * sizeof(float));
      } else if constexpr (pairs) {
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
      : sum{.top = logit_of_base(s.maximum[lane], logits),
            .sum = s.sum[lane],
            .max_logit = s.largest != nullptr ? s.largest[lane] * logits.scale : 0.0F} {
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
  const bool narrow = pairs && dims % 2 == 0 && t.gate.data == nullptr;
  for (int lane = 0; lane < s.count; lane += vec_lanes) {
    alignas(64) float scales[vec_lanes] = {};
    bool is_seen[vec_lanes];
    bool has_one_key[vec_lanes];
    for_rows(t, first, s, lane, [&](int i, std::int64_t row, std::int64_t head) {
      const SeenRow<Math> seen(t, s, i, logits);
      is_seen[i - lane] = seen.seen;
      has_one_key[i - lane] = seen.one_key;
      if (!seen.one_key) scales[i - lane] = close_row(t, row, head, seen.seen, seen.sum);
    });
    if constexpr (pairs) {
      if (narrow) narrow_rows(s.out + lane, stripe_lanes<Math>, t.head_dim_v, load(scales), rows);
    }
    if (!narrow) transpose(s.out + lane, stripe_lanes<Math>, t.head_dim_v, vec_lanes, rows, t.head_dim_v);
    for_rows(t, first, s, lane, [&](int i, std::int64_t row, std::int64_t head) {
      if (has_one_key[i - lane]) return write_one_key_row<T, K, Out>(t, row, head, s.first_key[i]);
      Out* const out = out_row<Out>(t, row, head);
      if (!is_seen[i - lane]) {  // 0 whatever was accumulated: a NaN in V reaches every row of a block
        __builtin_memset(out, 0, dims * sizeof(Out));
      } else if (narrow) {
        __builtin_memcpy(out, reinterpret_cast<const Out*>(rows) + (i - lane) * t.head_dim_v,
                         dims * sizeof(Out));
      } else {
        write_out<float, Out>(t, row, head, rows + (i - lane) * t.head_dim_v, scales[i - lane]);
      }
    });
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
