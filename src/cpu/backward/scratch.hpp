// Where a thread's buffers lie in its scratch memory. Offsets and sizes in f32 words; every buffer starts a
// cache line.
#pragma once

#include "cpu/backward/pack.hpp"

namespace tandem::cpu::TANDEM_TARGET {

struct Range {
  std::int64_t first = 0;
  std::int64_t last = 0;  ///< one past
};

/// Elements that a staged row of `columns` takes.
constexpr std::int64_t padded(std::int64_t columns) {
  return panels_of(columns) * panel_lanes;
}

template <bool paired>
struct BackwardScratch {
  static constexpr std::int64_t pair = paired ? 2 : 1;
  static constexpr bool on_tiles = paired && has_matrix_unit;
  /// Extra words at the end of each row of P and dS: rows a power of two apart would share a few cache sets.
  static constexpr std::int64_t skew = 16;

  /// Words that a product over `columns` sums over.
  static constexpr std::int64_t depth(std::int64_t columns) {
    return on_tiles ? row_words(columns) : (columns + pair - 1) / pair;
  }
  static constexpr std::int64_t row_words(std::int64_t columns) { return padded(columns) / pair; }

  /// 16-bit numbers from half panel to half panel of `seen`. Lanes are read eight bytes at a time.
  static constexpr std::int64_t seen_row(std::int64_t block_k) { return block_k + 8; }

  std::int64_t p_row = 0;         ///< words between the rows (keys) of P and dS
  std::int64_t ds_pairs_row = 0;  ///< words between the rows (keys, or pairs of keys) of dS as dQ reads it

  std::int64_t q_lanes = 0;                   ///< Q^T: panels of queries, a row for each word of head_dim_qk
  std::int64_t dout_lanes = 0;                ///< dO^T likewise
  std::int64_t q_panels = 0;                  ///< Q: panels of head_dim_qk, a row for each query (pair)
  std::int64_t dout_panels = 0;               ///< dO likewise
  std::int64_t dq = 0;                        ///< panels of head_dim_qk, a row for each query
  std::int64_t dq_total = 0;                  ///< the same in f64: runs of keys before
  std::int64_t lse = 0, delta = 0, live = 0;  ///< by query
  std::int64_t panel_live = 0;                ///< by panel of queries: whether all of them take part
  std::int64_t strips_seen = 0;               ///< a Range for each panel of queries
  std::int64_t panels_seeing = 0;             ///< a Range for each strip of keys
  std::int64_t k_rows = 0;                    ///< keys as staged rows
  std::int64_t v_rows = 0;
  std::int64_t k_panels = 0;  ///< panels of head_dim_qk, a row for each key (pair)
  std::int64_t p = 0;         ///< P^T: a row for each key, words of queries
  std::int64_t ds = 0;        ///< dS^T likewise
  /// dS^T: a row for each key pair, queries in words. On tiles dS: a row for each query, key pairs in words.
  /// Without pairs it is ds.
  std::int64_t ds_pairs = 0;
  std::int64_t weight = 0;     ///< dS / (dP - delta) of one panel of queries, f32
  std::int64_t tile = 0;       ///< what a register tile leaves
  std::int64_t row = 0;        ///< a sum over visible pairs alone
  std::int64_t functions = 0;  ///< memory of a program, for each half of a panel
  std::int64_t dp = 0;         ///< dP of one panel of queries, for the gradients of what functions read
  std::int64_t seen = 0;       ///< lanes that see a key, 16 bits: by half panel and key (function.hpp)
  std::int64_t kept = 0;       ///< lanes of `seen` that dropout keeps
  std::int64_t total = 0;

  TANDEM_INLINE BackwardScratch make(const BackwardShape& s) {
    BackwardScratch x;
    const auto take = [&x](std::int64_t words) __attribute__((always_inline)) {
      const std::int64_t at = x.total;
      x.total += (words + 15) / 16 * 16;
      return at;
    };
    x.p_row = s.block_q / pair + skew;
    x.ds_pairs_row = (on_tiles ? s.block_k / 2 : s.block_q) + skew;
    x.q_lanes = take(s.block_q * depth(s.head_dim_qk));
    x.dout_lanes = take(s.block_q * depth(s.head_dim_v));
    x.q_panels = take(s.block_q * row_words(s.head_dim_qk));
    x.dout_panels = take(s.block_q * row_words(s.head_dim_v));
    x.dq = take(s.block_q * padded(s.head_dim_qk));
    x.dq_total = take(2 * s.block_q * padded(s.head_dim_qk));
    x.lse = take(s.block_q);
    x.delta = take(s.block_q);
    x.live = take(s.block_q);
    x.panel_live = take(s.block_q / panel_lanes);
    constexpr auto range_words = static_cast<std::int64_t>(sizeof(Range) / sizeof(float));
    x.strips_seen = take(s.block_q / panel_lanes * range_words);
    x.panels_seeing = take((s.block_k + strip_rows - 1) / strip_rows * range_words);
    x.k_rows = take(s.block_k * row_words(s.head_dim_qk));
    x.v_rows = take(s.block_k * row_words(s.head_dim_v));
    x.k_panels = take(s.block_k * row_words(s.head_dim_qk));
    x.p = take(s.block_k * x.p_row);
    x.ds = take(s.block_k * x.p_row);
    x.ds_pairs = paired ? take((on_tiles ? s.block_q : s.block_k / 2) * x.ds_pairs_row) : x.ds;
    x.weight = take(s.block_k * panel_lanes);
    x.tile = take(strip_rows * panel_lanes);
    x.row = take(padded(s.head_dim_qk > s.head_dim_v ? s.head_dim_qk : s.head_dim_v));
    if (s.functions) {
      x.functions = take(2 * s.function_words);
      x.seen = take(s.block_q / vec_lanes * seen_row(s.block_k) / 2);
      if (s.dropout) x.kept = take(s.block_q / vec_lanes * seen_row(s.block_k) / 2);
      if (s.captured) x.dp = take(s.block_k * panel_lanes);
    }
    // While queries are staged, a panel of them lies where keys will.
    const std::int64_t longest = row_words(s.head_dim_qk > s.head_dim_v ? s.head_dim_qk : s.head_dim_v);
    const std::int64_t staging_end = x.k_rows + panel_lanes * longest;
    if (x.total < staging_end) x.total = staging_end;
    return x;
  }
};

}  // namespace tandem::cpu::TANDEM_TARGET
