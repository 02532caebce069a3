// Staging: queries once, keys once for every block of queries that sees them.
#pragma once

#include "cpu/backward/tile.hpp"
#include "cpu/forward/one_key.hpp"
#include "cpu/simd/transpose.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// The gradient of out . out - dLSE. Where the row sees one key and out is its v, the sum is dP's, bit for
/// bit.
template <typename Tile>
float delta_of(Tile& t, std::int64_t i) {
  const auto* const dout = row_of<const typename Tile::Element>(t.b.gated_dout, i);
  const auto* const out = row_of<const typename Tile::Element>(t.b.out, i);
  const Range keys = t.visible_keys(i, i);
  const float sum = keys.last - keys.first == 1 ? chained_dot(out, dout, static_cast<int>(t.d_v()))
                                                : dot_rows(out, dout, t.d_v());
  return t.b.dlse.data != nullptr ? sum - *row_of<float>(t.b.dlse, i) : sum;
}

template <typename Tile>
void stage_query_panel(Tile& t, const HeadRows& src, std::int64_t columns, std::int64_t p, const bool* live,
                       float* lanes, float* panels) {
  typename Tile::Staged* rows = t.staged(t.x.k_rows);  // no keys are staged yet
  const std::int64_t width = padded(columns);
  for (std::int64_t lane = 0; lane < panel_lanes; ++lane) {
    typename Tile::Staged* row = rows + lane * width;
    if (live[lane]) {
      const typename Tile::Element* user =
          row_of<const typename Tile::Element>(src, t.first_query + p * panel_lanes + lane);
      stage_row(user, columns, width, row);
      t.all_finite = t.all_finite && all_finite(user, columns);
    } else {
      __builtin_memset(row, 0, static_cast<std::size_t>(width) * sizeof(typename Tile::Staged));
    }
  }
  const std::int64_t words = Tile::Scratch::depth(columns);
  transpose(reinterpret_cast<const float*>(rows), width / Tile::pair, panel_lanes, static_cast<int>(words),
            lanes + p * panel_lanes * words, panel_lanes);
  to_panels(rows, panel_lanes, width, panels + p * panel_lanes / Tile::pair * panel_lanes,
            t.b.shape.block_q / Tile::pair * panel_lanes);
}

/// Packs Q and dO both ways and computes delta. A query that takes no part becomes zeros, whatever its rows
/// hold.
template <typename Tile>
void stage_queries(Tile& t) {
  t.all_finite = true;
  for (std::int64_t p = 0; p < t.panels; ++p) {
    bool live[panel_lanes];
    bool all_live = true;
    for (std::int64_t lane = 0; lane < panel_lanes; ++lane) {
      const std::int64_t i = t.first_query + p * panel_lanes + lane;
      live[lane] = p * panel_lanes + lane < t.queries && t.takes_part(i);
      const std::int64_t slot = p * panel_lanes + lane;
      all_live = all_live && live[lane];
      t.at(t.x.live)[slot] = live[lane] ? 1.0F : 0.0F;
      t.at(t.x.lse)[slot] = live[lane] ? *row_of<float>(t.b.lse, i) : 0.0F;
      t.at(t.x.delta)[slot] = live[lane] ? delta_of(t, i) : 0.0F;
    }
    t.at(t.x.panel_live)[p] = all_live ? 1.0F : 0.0F;
    stage_query_panel(t, t.b.q, t.d_qk(), p, live, t.at(t.x.q_lanes), t.at(t.x.q_panels));
    stage_query_panel(t, t.b.dout, t.d_v(), p, live, t.at(t.x.dout_lanes), t.at(t.x.dout_panels));
  }
}

template <typename Tile>
void stage_keys(Tile& t) {
  const std::int64_t k_width = padded(t.d_qk());
  const std::int64_t v_width = padded(t.d_v());
  typename Tile::Staged* k = t.staged(t.x.k_rows);
  typename Tile::Staged* v = t.staged(t.x.v_rows);
  for (std::int64_t r = 0; r < t.keys; ++r) {
    stage_row(row_of<const typename Tile::Element>(t.b.k, t.first_key + r), t.d_qk(), k_width,
              k + r * k_width);
    stage_row(row_of<const typename Tile::Element>(t.b.v, t.first_key + r), t.d_v(), v_width,
              v + r * v_width);
  }
  const auto rest = static_cast<std::size_t>(t.rows - t.keys) * sizeof(typename Tile::Staged);
  __builtin_memset(k + t.keys * k_width, 0, rest * static_cast<std::size_t>(k_width));
  __builtin_memset(v + t.keys * v_width, 0, rest * static_cast<std::size_t>(v_width));
  to_panels(k, t.rows, k_width, t.at(t.x.k_panels), t.b.shape.block_k / Tile::pair * panel_lanes);
}

/// Asks for the rows of k and v one key block on, which would otherwise be waited for when they are staged.
template <typename Tile>
void prefetch_next_keys(Tile& t, std::int64_t s) {
  const std::int64_t first = t.first_key + t.b.shape.block_k + s * strip_rows;
  const std::int64_t last = smaller(first + strip_rows, t.b.seqlen_k);
  constexpr auto line = static_cast<std::int64_t>(64 / sizeof(typename Tile::Element));
  for (std::int64_t key = first; key < last; ++key) {
    for (std::int64_t c = 0; c < t.d_qk(); c += line)
      __builtin_prefetch(row_of<const typename Tile::Element>(t.b.k, key) + c, 0, 2);
    for (std::int64_t c = 0; c < t.d_v(); c += line)
      __builtin_prefetch(row_of<const typename Tile::Element>(t.b.v, key) + c, 0, 2);
  }
}

template <typename Tile>
bool keys_finite(Tile& t) {
  for (std::int64_t r = 0; r < t.keys; ++r) {
    if (!all_finite(row_of<const typename Tile::Element>(t.b.k, t.first_key + r), t.d_qk())) return false;
  }
  return true;
}

}  // namespace tandem::cpu::TANDEM_TARGET
