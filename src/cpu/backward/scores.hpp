// The scores of one strip of keys and one panel of queries: S^T to P^T, then dP^T to dS^T.
#pragma once

#include "cpu/backward/tile.hpp"
#include "cpu/common/logits.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/simd/transpose.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// A panel's queries of one key, as words of P or dS.
template <typename Tile>
TANDEM_INLINE void store_query_row(const Vec* v, float* words) {
  if constexpr (Tile::paired) {
    store(bits_as_f32(join_bf16(v[0], v[1])), words);
  } else {
    store(v[0], words);
    store(v[1], words + vec_lanes);
  }
}

/// A value of half n of panel p and row r as dropout leaves it: 0 or scaled.
template <typename Tile>
TANDEM_INLINE Vec kept_times_scale(Tile& t, std::int64_t p, std::int64_t r, int n, Vec x) {
  const Vec scaled = hn::Mul(x, broadcast(t.b.functions->dropout->scale));
  return hn::IfThenElseZero(mask_of(t.kept_lanes(p, r, n)), scaled);
}

template <bool transforms, bool masked, typename Tile>
void exponentials(Tile& t, std::int64_t p, std::int64_t s) {
  const SlopedLogits logits(t.b.score);
  const Vec lse[2] = {load(t.at(t.x.lse) + p * panel_lanes),
                      load(t.at(t.x.lse) + p * panel_lanes + vec_lanes)};
  for (int i = 0; i < t.rows_of_strip(s); ++i) {
    const std::int64_t r = s * strip_rows + i;
    Vec probability[2];
    for (int n = 0; n < 2; ++n) {
      // Where one key takes all of a row, lse is this product rounded. The compiler may fuse it with the
      // subtraction: then the difference is that rounding, not 0.
      Vec logit = load(t.at(t.x.tile) + i * panel_lanes + n * vec_lanes);
      const Vec slope = logits.to_logit<transforms>(logit);
      probability[n] = exp2(hn::Mul(hn::Sub(logit, lse[n]), broadcast(log2_e)));
      if constexpr (masked) probability[n] = hn::IfThenElseZero(t.visible(p, r, n), probability[n]);
      store(hn::Mul(probability[n], slope), t.at(t.x.weight) + r * panel_lanes + n * vec_lanes);
    }
    store_query_row<Tile>(probability, t.at(t.x.p) + r * t.x.p_row + p * panel_lanes / Tile::pair);
  }
}

/// S^T of one strip and panel, then P^T and the weight scale * slope * P that dS needs.
template <typename Tile>
void probabilities(Tile& t, std::int64_t p, std::int64_t s) {
  const std::int64_t depth = Tile::Scratch::depth(t.d_qk());
  multiply<Tile::paired, false>({.a = t.at(t.x.k_rows) + s * strip_rows * Tile::Scratch::row_words(t.d_qk()),
                                 .row_step = Tile::Scratch::row_words(t.d_qk()),
                                 .step = 1,
                                 .b = t.at(t.x.q_lanes) + p * panel_lanes * depth,
                                 .depth = depth,
                                 .c = t.at(t.x.tile),
                                 .c_stride = panel_lanes},
                                t.rows_of_strip(s));
  const bool masked = !t.sees_all(p, s);
  t.masked = t.masked || masked;
  if (SlopedLogits(t.b.score).transforms()) {
    masked ? exponentials<true, true>(t, p, s) : exponentials<true, false>(t, p, s);
  } else {
    masked ? exponentials<false, true>(t, p, s) : exponentials<false, false>(t, p, s);
  }
}

/// `dropped`: there is dropout.
template <bool masked, bool dropped, typename Tile>
void differences(Tile& t, std::int64_t p, std::int64_t s) {
  const Vec delta[2] = {load(t.at(t.x.delta) + p * panel_lanes),
                        load(t.at(t.x.delta) + p * panel_lanes + vec_lanes)};
  constexpr bool by_query = Tile::Scratch::on_tiles;
  alignas(64) float turned[by_query ? strip_rows / 2 * panel_lanes : 1];
  for (int i = 0; i < t.rows_of_strip(s); i += Tile::pair) {
    const std::int64_t r = s * strip_rows + i;
    Vec ds[Tile::pair][2];
    for (int e = 0; e < Tile::pair; ++e) {
      for (int n = 0; n < 2; ++n) {
        Vec dp = load(t.at(t.x.tile) + (i + e) * panel_lanes + n * vec_lanes);
        if constexpr (dropped) dp = kept_times_scale(t, p, r + e, n, dp);
        const Vec weight = load(t.at(t.x.weight) + (r + e) * panel_lanes + n * vec_lanes);
        ds[e][n] = hn::Mul(weight, hn::Sub(dp, delta[n]));
        if constexpr (masked) ds[e][n] = hn::IfThenElseZero(t.visible(p, r + e, n), ds[e][n]);
      }
      store_query_row<Tile>(ds[e], t.at(t.x.ds) + (r + e) * t.x.p_row + p * panel_lanes / Tile::pair);
    }
    if constexpr (Tile::paired) {
      float* const pairs = by_query ? turned + i / 2 * panel_lanes
                                    : t.at(t.x.ds_pairs) + r / 2 * t.x.ds_pairs_row + p * panel_lanes;
      for (int n = 0; n < 2; ++n) {
        store(bits_as_f32(pair_bf16(ds[0][n], ds[1][n])), pairs + n * vec_lanes);
      }
    }
  }
  if constexpr (by_query) {
    transpose(turned, panel_lanes, strip_rows / 2, panel_lanes,
              t.at(t.x.ds_pairs) + p * panel_lanes * t.x.ds_pairs_row + s * strip_rows / 2, t.x.ds_pairs_row);
  }
}

/// dP^T of one strip and panel, then dS^T.
template <typename Tile>
void score_gradients(Tile& t, std::int64_t p, std::int64_t s) {
  const std::int64_t depth = Tile::Scratch::depth(t.d_v());
  multiply<Tile::paired, false>({.a = t.at(t.x.v_rows) + s * strip_rows * Tile::Scratch::row_words(t.d_v()),
                                 .row_step = Tile::Scratch::row_words(t.d_v()),
                                 .step = 1,
                                 .b = t.at(t.x.dout_lanes) + p * panel_lanes * depth,
                                 .depth = depth,
                                 .c = t.at(t.x.tile),
                                 .c_stride = panel_lanes},
                                t.rows_of_strip(s));
  if (t.b.shape.dropout) return differences<true, true>(t, p, s);
  t.sees_all(p, s) ? differences<false, false>(t, p, s) : differences<true, false>(t, p, s);
}

}  // namespace tandem::cpu::TANDEM_TARGET
