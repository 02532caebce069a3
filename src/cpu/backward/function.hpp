// Functions of the user's own in the backward pass: which pairs of a key block are visible, and P^T out of
// scores with the function's slope in the weight of dS.
#pragma once

#include "cpu/backward/scores.hpp"
#include "cpu/functions/bounds.hpp"
#include "cpu/functions/lanes.hpp"
#include "cpu/simd/philox.hpp"

namespace tandem::cpu::TANDEM_TARGET {

constexpr int halves = static_cast<int>(panel_lanes / vec_lanes);

/// The place of half n of panel p.
template <typename Tile>
FunctionPlace place_of(Tile& t, std::int64_t p, int n) {
  FunctionPlace place;
  place.batch = static_cast<std::int32_t>(t.b.batch);
  place.seqlen_q = static_cast<std::int32_t>(t.b.seqlen_q);
  place.seqlen_k = static_cast<std::int32_t>(t.b.seqlen_k);
  for (int i = 0; i < vec_lanes; ++i) {
    place.query[i] = static_cast<std::int32_t>(t.first_query + p * panel_lanes + n * vec_lanes + i);
    place.head[i] = static_cast<std::int32_t>(t.b.head);
  }
  return place;
}

/// Before the key blocks of a block of queries: what programs compute once for all of it.
template <typename Tile>
void prepare_functions(Tile& t) {
  const TileFunctions& functions = *t.b.functions;
  const FunctionPlace place = place_of(t, 0, 0);
  for (int n = 0; n < halves; ++n) {
    float* const memory = t.at(t.x.functions) + n * t.b.shape.function_words;
    for (const FunctionProgram* program : {functions.score, functions.mask, functions.captured}) {
      if (program != nullptr) evaluate_uniform(*program, place, memory);
    }
  }
}

/// Has a function evaluated for rows [first, last) of the key block, so many at a time as a program takes:
/// f(row, rows).
template <typename F>
TANDEM_INLINE void in_function_keys(std::int64_t first, std::int64_t last, F f) {
  for (std::int64_t r = first; r < last; r += function_keys) {
    f(r, static_cast<int>(smaller(function_keys, last - r)));
  }
}

/// What the mask function says of panel p and the key block.
template <typename Tile>
Visible visible_to_panel(Tile& t, std::int64_t p) {
  if (t.b.functions->mask == nullptr) return Visible::all;
  const std::int64_t first = t.first_query + p * panel_lanes;
  return visible_of(*t.b.functions->mask,
                    {.batch = t.b.batch,
                     .seqlen_q = t.b.seqlen_q,
                     .seqlen_k = t.b.seqlen_k,
                     .head = {.low = t.b.head, .high = t.b.head},
                     .query = {.low = first, .high = smaller(first + panel_lanes, t.b.seqlen_q) - 1},
                     .key = {.low = t.first_key, .high = t.first_key + t.keys - 1}});
}

/// Writes seen_lanes of half n of panel p, and adds to what the panel sees. Without a mask it sees all that
/// the window leaves.
template <typename Tile>
void see_by_half(Tile& t, const FunctionProgram* mask, std::int64_t p, int n, const Range& rows,
                 SeenLanes& seen) {
  std::uint16_t* const lanes = t.seen_lanes(p, 0, n);
  __builtin_memset(lanes, 0, static_cast<std::size_t>(t.b.shape.block_k) * sizeof(*lanes));
  FunctionPlace place = place_of(t, p, n);
  float* const memory = t.at(t.x.functions);
  const auto alive = hn::Ne(load(t.at(t.x.live) + p * panel_lanes + n * vec_lanes), zero());
  const std::uint16_t live = lane_bits(hn::VecFromMask(i32_lanes, hn::RebindMask(i32_lanes, alive)));
  const bool unbounded = t.b.window_left < 0 && t.b.window_right < 0;
  in_function_keys(rows.first, rows.last, [&](std::int64_t r, int count) {
    place.first_key = static_cast<std::int32_t>(t.first_key + r);
    place.keys = count;
    const FunctionSource visible = evaluate_mask(mask, place, memory);
    const auto window = [&](int j) __attribute__((always_inline)) {
      return hn::VecFromMask(i32_lanes, hn::RebindMask(i32_lanes, t.in_window(p, r + j, n)));
    };
    write_lanes(visible, count, live, unbounded, window, static_cast<int>(r), lanes + r, seen);
  });
}

/// P and dS of a strip that panel p does not see, but one before and one behind it do.
template <typename Tile>
void clear_scores(Tile& t, std::int64_t p, std::int64_t s) {
  for (int i = 0; i < t.rows_of_strip(s); ++i) {
    const std::int64_t at = (s * strip_rows + i) * t.x.p_row + p * panel_lanes / Tile::pair;
    constexpr auto bytes = static_cast<std::size_t>(panel_lanes / Tile::pair) * sizeof(float);
    __builtin_memset(t.at(t.x.p) + at, 0, bytes);
    __builtin_memset(t.at(t.x.ds) + at, 0, bytes);
  }
}

/// Finds what is visible of a key block, and narrows the strips of each panel to those. `masked` says
/// whether anything is.
template <typename Tile>
void see_by_functions(Tile& t) {
  for (std::int64_t s = 0; s < t.strips; ++s) t.panels_seeing(s) = {};
  for (std::int64_t p = 0; p < t.panels; ++p) {
    Range& strips = t.strips_seen(p);
    Range rows{.first = strips.first * strip_rows, .last = smaller(strips.last * strip_rows, t.keys)};
    const Visible visible = visible_to_panel(t, p);
    if (visible == Visible::none) rows = {};
    const FunctionProgram* const mask = visible == Visible::all ? nullptr : t.b.functions->mask;
    SeenLanes seen;
    for (int n = 0; n < halves; ++n) see_by_half(t, mask, p, n, rows, seen);
    strips = {};
    if (seen.last == 0) continue;
    strips = {.first = seen.first / strip_rows, .last = (seen.last + strip_rows - 1) / strip_rows};
    t.masked = true;
    for (std::int64_t s = strips.first; s < strips.last; ++s) {
      Range& panels = t.panels_seeing(s);
      panels = {.first = panels.last == 0 ? p : panels.first, .last = p + 1};
    }
  }
  for (std::int64_t s = 0; s < t.strips; ++s) {
    for (std::int64_t p = t.panels_seeing(s).first; p < t.panels_seeing(s).last; ++p) {
      const Range strips = t.strips_seen(p);
      if (s < strips.first || s >= strips.last) clear_scores(t, p, s);
    }
  }
}

/// What a function sees, out of the raw products of `count` keys: the scaled score, softcapped.
template <typename Tile>
void scale_and_cap(Tile& t, float* scores, int count) {
  const SlopedLogits logits(t.b.score);
  for (int j = 0; j < count; ++j) {
    for (int n = 0; n < halves; ++n) {
      float* const s = scores + j * panel_lanes + n * vec_lanes;
      store(logits.logit(load(s)), s);
    }
  }
}

/// Finds what dropout keeps of rows [r, r + count) and panel p.
template <typename Tile>
void find_kept(Tile& t, std::int64_t p, std::int64_t r, int count) {
  for (int n = 0; t.b.shape.dropout && n < halves; ++n) {
    FunctionPlace place = place_of(t, p, n);
    place.first_key = static_cast<std::int32_t>(t.first_key + r);
    place.keys = count;
    write_kept(*t.b.functions->dropout, place, t.kept_lanes(p, r, n));
  }
}

/// P^T of rows [r, r + count) and panel p, and the weight scale * slope * P. Scores are where weights will
/// be.
template <typename Tile>
void exponentials_by_functions(Tile& t, std::int64_t p, std::int64_t r, int count) {
  const FunctionProgram* const program = t.b.functions->score;
  const SlopedLogits logits(t.b.score);
  float* const scores = t.at(t.x.weight) + r * panel_lanes;
  scale_and_cap(t, scores, count);
  find_kept(t, p, r, count);
  FunctionSource values[halves];
  FunctionSource slopes[halves];
  for (int n = 0; n < halves; ++n) {
    values[n] = {scores + n * vec_lanes, panel_lanes, false};
    if (program == nullptr) continue;
    FunctionPlace place = place_of(t, p, n);
    place.first_key = static_cast<std::int32_t>(t.first_key + r);
    place.keys = count;
    place.scores = scores + n * vec_lanes;
    place.score_step = panel_lanes;
    float* const memory = t.at(t.x.functions) + n * t.b.shape.function_words;
    evaluate(*program, place, memory);
    values[n] = source_of(program->value, place, memory);
    slopes[n] = source_of(program->slope, place, memory);
  }
  for (int j = 0; j < count; ++j) {
    Vec probability[halves];
    for (int n = 0; n < halves; ++n) {
      float* const weight = scores + j * panel_lanes + n * vec_lanes;
      const Vec logit = fetch(values[n], j);
      Vec slope = logits.slope(load(weight));
      if (program != nullptr) slope = hn::Mul(slope, fetch(slopes[n], j));
      std::uint16_t* const lanes = t.seen_lanes(p, r + j, n);
      const Mask seen = hn::And(mask_of(lanes), hn::Ne(logit, broadcast(-__builtin_inff())));
      *lanes = lane_bits(hn::VecFromMask(i32_lanes, hn::RebindMask(i32_lanes, seen)));
      const Vec lse = load(t.at(t.x.lse) + p * panel_lanes + n * vec_lanes);
      const Vec power = exp2(hn::Mul(hn::Sub(logit, lse), broadcast(log2_e)));
      probability[n] = hn::IfThenElseZero(seen, power);
      store(hn::IfThenElseZero(seen, hn::Mul(power, slope)), weight);
      if (t.b.shape.dropout) probability[n] = kept_times_scale(t, p, r + j, n, probability[n]);
    }
    store_query_row<Tile>(probability, t.at(t.x.p) + (r + j) * t.x.p_row + p * panel_lanes / Tile::pair);
  }
}

/// The products of staged rows of keys with the queries of panel p, for the strips that it sees: S^T out of K
/// and Q, dP^T out of V and dO.
template <typename Tile>
void products_of_panel(Tile& t, std::int64_t p, const Range& strips, std::int64_t columns,
                       std::int64_t key_rows, std::int64_t query_lanes, std::int64_t to) {
  const std::int64_t depth = Tile::Scratch::depth(columns);
  const std::int64_t row_words = Tile::Scratch::row_words(columns);
  for (std::int64_t s = strips.first; s < strips.last; ++s) {
    multiply<Tile::paired, false>({.a = t.at(key_rows) + s * strip_rows * row_words,
                                   .row_step = row_words,
                                   .step = 1,
                                   .b = t.at(query_lanes) + p * panel_lanes * depth,
                                   .depth = depth,
                                   .c = t.at(to) + s * strip_rows * panel_lanes,
                                   .c_stride = panel_lanes},
                                  t.rows_of_strip(s));
  }
}

/// S^T of the strips that a panel sees, then P^T and the weights.
template <typename Tile>
void probabilities_by_functions(Tile& t, std::int64_t p, const Range& strips) {
  products_of_panel(t, p, strips, t.d_qk(), t.x.k_rows, t.x.q_lanes, t.x.weight);
  in_function_keys(strips.first * strip_rows, smaller(strips.last * strip_rows, t.rows),
                   [&](std::int64_t r, int count) { exponentials_by_functions(t, p, r, count); });
}

/// Whether no key is in a row's softmax but the sink: then LSE is the sink, and out is 0. A row whose keys
/// have all vanished beside the sink is no different.
template <typename Tile>
bool is_empty_row(Tile& t, std::int64_t query) {
  if (*row_of<float>(t.b.lse, query) != *t.b.sink) return false;
  const auto* const out = row_of<const typename Tile::Element>(t.b.out, query);
  for (std::int64_t c = 0; c < t.d_v(); ++c) {
    if (to_f32(out[c]) != 0.0F) return false;
  }
  return true;
}

}  // namespace tandem::cpu::TANDEM_TARGET
