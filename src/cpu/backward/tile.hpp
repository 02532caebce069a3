// One block of queries as the kernel works on it: where its buffers are, and who sees what.
#pragma once

#include "cpu/backward/pack.hpp"
#include "cpu/backward/scratch.hpp"
#include "cpu/functions/lanes.hpp"

namespace tandem::cpu::TANDEM_TARGET {

TANDEM_INLINE std::int64_t smaller(std::int64_t a, std::int64_t b) {
  return a < b ? a : b;
}
TANDEM_INLINE std::int64_t clamp(std::int64_t x, std::int64_t low, std::int64_t high) {
  return x < low ? low : (x > high ? high : x);
}

/// A panel is panel_lanes queries of the block, a strip is strip_rows keys of the key block at hand.
template <typename T>
struct BackwardTile {
  using Element = T;
  static constexpr bool paired = has_bf16_dot && __is_same(T, bf16);
  static constexpr std::int64_t pair = paired ? 2 : 1;
  using Scratch = BackwardScratch<paired>;
  using Staged = typename StagedOf<paired>::Type;

  BackwardTile(const BackwardBlock& block, float* scratch_)
      : b(block),
        x(Scratch::make(block.shape)),
        scratch(scratch_),
        shift(block.seqlen_k - block.seqlen_q),
        first_query(block.block * block.shape.block_q),
        queries(smaller(block.shape.block_q, block.seqlen_q - first_query)),
        panels((queries + panel_lanes - 1) / panel_lanes) {}

  const BackwardBlock& b;
  const Scratch x;
  float* const scratch;
  const std::int64_t shift;  ///< query i stands on the diagonal at key i + shift
  const std::int64_t first_query;
  const std::int64_t queries;
  const std::int64_t panels;
  bool all_finite = true;  ///< no element of the block's q and dout is NaN or infinite

  // The key block at hand.
  std::int64_t first_key = 0;
  std::int64_t keys = 0;
  std::int64_t rows = 0;  ///< keys and the zero rows that fill up the register tile
  std::int64_t strips = 0;
  bool masked = false;  ///< some strip that was computed has masked scores

  [[nodiscard]] std::int64_t d_qk() const { return b.shape.head_dim_qk; }

  [[nodiscard]] std::int64_t d_v() const { return b.shape.head_dim_v; }

  [[nodiscard]] float* at(std::int64_t offset) const { return scratch + offset; }

  [[nodiscard]] Staged* staged(std::int64_t offset) const {
    return reinterpret_cast<Staged*>(scratch + offset);
  }

  /// Keys that some query of [first, last] sees.
  [[nodiscard]] Range visible_keys(std::int64_t first, std::int64_t last) const {
    Range r{.first = 0, .last = b.seqlen_k};
    if (b.window_left >= 0) r.first = clamp(first + shift - b.window_left, 0, b.seqlen_k);
    if (b.window_right >= 0) r.last = clamp(last + shift + b.window_right + 1, 0, b.seqlen_k);
    return r;
  }

  /// Whether query i, which is in use, takes part: it sees a key and its softmax has a sum.
  [[nodiscard]] bool takes_part(std::int64_t i) const {
    const Range seen = visible_keys(i, i);
    return seen.first < seen.last && *row_of<float>(b.lse, i) != -__builtin_inff();
  }

  /// Strips of the key block that some query of panel p sees, and panels of which that is so for strip s;
  /// both follow one another. Set by `start_key_block`.
  [[nodiscard]] Range& strips_seen(std::int64_t p) const { return range(x.strips_seen, p); }
  [[nodiscard]] Range& panels_seeing(std::int64_t s) const { return range(x.panels_seeing, s); }

  void start_key_block(std::int64_t first) {
    first_key = first;
    keys = smaller(b.shape.block_k, b.seqlen_k - first);
    constexpr std::int64_t whole = Scratch::on_tiles ? strip_rows : 4;
    rows = (keys + whole - 1) / whole * whole;
    strips = (rows + strip_rows - 1) / strip_rows;
    masked = false;
    for (std::int64_t s = 0; s < strips; ++s) panels_seeing(s) = {};
    for (std::int64_t p = 0; p < panels; ++p) {
      const Range seen = strips_with_keys_of(p);
      strips_seen(p) = seen;
      for (std::int64_t s = seen.first; s < seen.last; ++s) {
        Range& panels_of_s = panels_seeing(s);
        panels_of_s = {.first = panels_of_s.last == 0 ? p : panels_of_s.first, .last = p + 1};
      }
    }
  }

  [[nodiscard]] int rows_of_strip(std::int64_t s) const {
    return static_cast<int>(smaller(strip_rows, rows - s * strip_rows));
  }

  /// Whether every lane of panel p takes part and sees every row of strip s. With functions not asked.
  [[nodiscard]] bool sees_all(std::int64_t p, std::int64_t s) const {
    if (b.functions != nullptr) return false;
    const std::int64_t first = first_query + p * panel_lanes + shift;
    const std::int64_t last = first + panel_lanes - 1;
    const std::int64_t top = first_key + s * strip_rows;
    const std::int64_t bottom = top + rows_of_strip(s) - 1;
    if (bottom >= first_key + keys) return false;
    if (b.window_left >= 0 && top < last - b.window_left) return false;
    if (b.window_right >= 0 && bottom > first + b.window_right) return false;
    return at(x.panel_live)[p] != 0.0F;
  }

  /// Queries of the block, counted from its first one, that see row r of the key block.
  [[nodiscard]] Range queries_seeing(std::int64_t r) const {
    if (r >= keys) return {};
    const std::int64_t diagonal = first_key + r - shift - first_query;
    Range seen{.first = 0, .last = queries};
    if (b.window_right >= 0) seen.first = clamp(diagonal - b.window_right, 0, queries);
    if (b.window_left >= 0) seen.last = clamp(diagonal + b.window_left + 1, 0, queries);
    return seen;
  }

  /// With functions: a bit for each lane of half n of panel p that takes part and sees row r.
  [[nodiscard]] std::uint16_t* seen_lanes(std::int64_t p, std::int64_t r, int n) const {
    return lanes_at(x.seen, p, r, n);
  }

  /// With dropout: those of them whose entry of P it keeps, and others.
  [[nodiscard]] std::uint16_t* kept_lanes(std::int64_t p, std::int64_t r, int n) const {
    return lanes_at(x.kept, p, r, n);
  }

  /// Whether query i of the block, which is in queries_seeing(r), sees row r.
  [[nodiscard]] bool sees(std::int64_t i, std::int64_t r) const {
    if (b.functions == nullptr) return true;
    const auto half = static_cast<int>(i % panel_lanes / vec_lanes);
    return (*seen_lanes(i / panel_lanes, r, half) >> i % vec_lanes & 1) != 0;
  }

  /// Lanes of half n of panel p that take part and see row r.
  [[nodiscard]] Mask visible(std::int64_t p, std::int64_t r, int n) const {
    if (b.functions != nullptr) return mask_of(seen_lanes(p, r, n));
    return in_window(p, r, n);
  }

  /// What the window shows, whatever a function says.
  [[nodiscard]] Mask in_window(std::int64_t p, std::int64_t r, int n) const {
    const Range seen = queries_seeing(r);
    const std::int64_t origin = p * panel_lanes + n * vec_lanes;
    const auto lane = hn::Iota(i32_lanes, 0);
    const auto first =
        hn::Set(i32_lanes, static_cast<std::int32_t>(clamp(seen.first - origin, 0, vec_lanes)));
    const auto last = hn::Set(i32_lanes, static_cast<std::int32_t>(clamp(seen.last - origin, 0, vec_lanes)));
    const auto inside = hn::AndNot(hn::Lt(lane, first), hn::Lt(lane, last));
    return hn::And(hn::RebindMask(f32_lanes, inside), hn::Ne(load(at(x.live) + origin), zero()));
  }

 private:
  [[nodiscard]] std::uint16_t* lanes_at(std::int64_t offset, std::int64_t p, std::int64_t r, int n) const {
    const std::int64_t half = p * (panel_lanes / vec_lanes) + n;
    return reinterpret_cast<std::uint16_t*>(scratch + offset) + half * Scratch::seen_row(b.shape.block_k) + r;
  }

  [[nodiscard]] Range& range(std::int64_t offset, std::int64_t i) const {
    return reinterpret_cast<Range*>(scratch + offset)[i];
  }

  [[nodiscard]] Range strips_with_keys_of(std::int64_t p) const {
    const std::int64_t first = first_query + p * panel_lanes;
    const Range seen = visible_keys(first, smaller(first + panel_lanes, first_query + queries) - 1);
    const std::int64_t low = clamp(seen.first - first_key, 0, keys);
    const std::int64_t high = clamp(seen.last - first_key, 0, keys);
    if (low >= high) return {};
    return {.first = low / strip_rows, .last = (high + strip_rows - 1) / strip_rows};
  }
};

}  // namespace tandem::cpu::TANDEM_TARGET
