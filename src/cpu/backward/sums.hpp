// The three products that add to gradients: dQ += dS K, dK += dS^T Q, dV += P^T dO.
#pragma once

#include "cpu/backward/tile.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// Where the sums of dk or dv of a key block are: row r of panel n at data + r * row_step + n * panel_step.
struct Sums {
  float* data = nullptr;
  std::int64_t row_step = 0;
  std::int64_t panel_step = 0;
  std::int64_t columns = 0;
  bool exact = false;  ///< the user's own rows: no column past the last may be written

  [[nodiscard]] bool wanted() const { return data != nullptr; }
};

template <typename Tile>
Sums sums(Tile& t, float* sum, const HeadRows& user, std::int64_t columns) {
  if (user.data == nullptr) return {};
  if (sum == nullptr) {
    return {.data = row_of<float>(user, t.first_key),
            .row_step = user.row_stride,
            .panel_step = panel_lanes,
            .columns = columns,
            .exact = true};
  }
  return {.data = sum + (t.b.first_sum_row + t.first_key) * panel_lanes,
          .row_step = panel_lanes,
          .panel_step = t.b.sum_rows * panel_lanes,
          .columns = columns};
}

template <typename Tile>
void add_dq(Tile& t) {
  const std::int64_t ds_row = Tile::paired ? t.x.ds_pairs_row : t.x.p_row;
  for (std::int64_t n = 0; n < panels_of(t.d_qk()); ++n) {
    const float* k = t.at(t.x.k_panels) + n * (t.b.shape.block_k / Tile::pair) * panel_lanes;
    float* dq = t.at(t.x.dq) + n * t.b.shape.block_q * panel_lanes;
    for (std::int64_t p = 0; p < t.panels; ++p) {
      const Range strips = t.strips_seen(p);
      const std::int64_t first = strips.first * strip_rows / Tile::pair;
      const std::int64_t last = smaller(strips.last * strip_rows, t.rows) / Tile::pair;
      if (first >= last) continue;
      constexpr bool by_query = Tile::Scratch::on_tiles;
      const std::int64_t query = p * panel_lanes;
      const std::int64_t begin = by_query ? query * ds_row + first : first * ds_row + query;
      multiply<Tile::paired, true>({.a = t.at(t.x.ds_pairs) + begin,
                                    .row_step = by_query ? ds_row : 1,
                                    .step = by_query ? 1 : ds_row,
                                    .b = k + first * panel_lanes,
                                    .depth = last - first,
                                    .c = dq + query * panel_lanes,
                                    .c_stride = panel_lanes},
                                   panel_lanes);
    }
  }
}

/// sums += A^T B, where A is P or dS and B is dO or Q in panels. The first to come overwrites.
template <typename Tile>
void add_keys(Tile& t, const float* a, const float* b, const Sums& sums, bool first) {
  for (std::int64_t n = 0; n < panels_of(sums.columns); ++n) {
    const float* panel = b + n * (t.b.shape.block_q / Tile::pair) * panel_lanes;
    for (std::int64_t s = 0; s < t.strips; ++s) {
      const Range seen = t.panels_seeing(s);
      const std::int64_t first_word = seen.first * panel_lanes / Tile::pair;
      const int rows = static_cast<int>(smaller(strip_rows, t.keys - s * strip_rows));
      float* c = sums.data + s * strip_rows * sums.row_step + n * sums.panel_step;
      Product product{.a = a + s * strip_rows * t.x.p_row + first_word,
                      .row_step = t.x.p_row,
                      .step = 1,
                      .b = panel + first_word * panel_lanes,
                      .depth = (seen.last - seen.first) * panel_lanes / Tile::pair,
                      .c = c,
                      .c_stride = sums.row_step};
      const std::int64_t width = smaller(panel_lanes, sums.columns - n * panel_lanes);
      if (sums.exact && width < panel_lanes) {
        product.c = t.at(t.x.tile);
        product.c_stride = panel_lanes;
        multiply<Tile::paired, false>(product, rows);
        for (int r = 0; r < rows; ++r) {
          add_words(t.at(t.x.tile) + r * panel_lanes, width, first, c + r * sums.row_step);
        }
      } else if (first) {
        multiply<Tile::paired, false>(product, rows);
      } else if (product.depth > 0) {
        multiply<Tile::paired, true>(product, rows);
      }
    }
  }
}

/// P or dS of row r and a query of the block.
template <typename Tile>
float score(Tile& t, std::int64_t matrix, std::int64_t r, std::int64_t query) {
  const float* row = t.at(matrix) + r * t.x.p_row;
  if constexpr (Tile::paired) {
    bf16 x;
    __builtin_memcpy(&x, reinterpret_cast<const char*>(row) + query * 2, sizeof(x));
    return to_f32(x);
  } else {
    return row[query];
  }
}

/// sum += factor * row.
template <typename T>
TANDEM_INLINE void add_row(const T* row, std::int64_t columns, float factor, float* sum) {
  for (std::int64_t c = 0; c < columns; ++c) sum[c] += factor * to_f32(row[c]);
}

/// A row of panels = or += sum, which becomes 0.
TANDEM_INLINE void move_sum(float* sum, std::int64_t columns, bool first, float* out,
                            std::int64_t panel_step) {
  for (std::int64_t c = 0; c < columns; c += panel_lanes) {
    add_words(sum + c, smaller(panel_lanes, columns - c), first, out + c / panel_lanes * panel_step);
  }
  __builtin_memset(sum, 0, static_cast<std::size_t>(columns) * sizeof(float));
}

/// dq, dk and dv of this tile by visible pairs alone: exact where a NaN or infinity lies next to masked
/// scores.
template <typename Tile>
void add_pairwise(Tile& t, bool first, const Sums& dk, const Sums& dv) {
  using Element = const typename Tile::Element;
  float* const sum = t.at(t.x.row);
  __builtin_memset(sum, 0,
                   sizeof(float) * static_cast<std::size_t>(padded(t.d_qk() > t.d_v() ? t.d_qk() : t.d_v())));
  const auto add_key = [&](std::int64_t r, std::int64_t matrix, const HeadRows& rows, const Sums& sums) {
    const Range seen = t.queries_seeing(r);
    for (std::int64_t i = seen.first; i < seen.last; ++i) {
      if (t.at(t.x.live)[i] == 0.0F || !t.sees(i, r)) continue;
      add_row(row_of<Element>(rows, t.first_query + i), sums.columns, score(t, matrix, r, i), sum);
    }
    move_sum(sum, sums.columns, first, sums.data + r * sums.row_step, sums.panel_step);
  };
  for (std::int64_t r = 0; r < t.keys; ++r) {
    if (dv.wanted()) add_key(r, t.x.p, t.b.dout, dv);
    if (dk.wanted()) add_key(r, t.x.ds, t.b.q, dk);
  }
  for (std::int64_t i = 0; t.b.dq.data != nullptr && i < t.queries; ++i) {
    if (t.at(t.x.live)[i] == 0.0F) continue;
    const Range keys = t.visible_keys(t.first_query + i, t.first_query + i);
    for (std::int64_t r = clamp(keys.first - t.first_key, 0, t.keys);
         r < keys.last - t.first_key && r < t.keys; ++r) {
      if (!t.sees(i, r)) continue;
      add_row(row_of<Element>(t.b.k, t.first_key + r), t.d_qk(), score(t, t.x.ds, r, i), sum);
    }
    move_sum(sum, t.d_qk(), false, t.at(t.x.dq) + i * panel_lanes, t.b.shape.block_q * panel_lanes);
  }
}

/// Adds dq of a run of keys to those of the runs before.
template <typename Tile>
void fold_dq(Tile& t, std::int64_t words) {
  float* const dq = t.at(t.x.dq);
  auto* const total = reinterpret_cast<double*>(t.at(t.x.dq_total));
  for (std::int64_t i = 0; i < words; ++i) {
    total[i] += static_cast<double>(dq[i]);
    dq[i] = 0.0F;
  }
}

/// The sum of all runs, rounded to f32.
template <typename Tile>
void close_dq(Tile& t, std::int64_t words) {
  float* const dq = t.at(t.x.dq);
  const auto* const total = reinterpret_cast<const double*>(t.at(t.x.dq_total));
  for (std::int64_t i = 0; i < words; ++i) dq[i] = static_cast<float>(total[i]);
}

template <typename Tile>
void write_dq(Tile& t) {
  const std::int64_t panel_step = t.b.shape.block_q * panel_lanes;
  for (std::int64_t i = 0; i < t.queries; ++i) {
    if (t.at(t.x.live)[i] != 0.0F) continue;
    for (std::int64_t n = 0; n < panels_of(t.d_qk()); ++n) {
      __builtin_memset(t.at(t.x.dq) + n * panel_step + i * panel_lanes, 0, sizeof(float) * panel_lanes);
    }
  }
  from_panels<typename Tile::Element>(t.b.shape.dq, t.at(t.x.dq), panel_step, t.queries, t.d_qk(), t.b.dq,
                                      t.first_query);
}

}  // namespace tandem::cpu::TANDEM_TARGET
