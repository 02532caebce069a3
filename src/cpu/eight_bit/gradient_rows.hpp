// Queries of the backward pass in 8 bits (gradients.cpp): what is known of rows before a tile is computed, by
// which P, dS and what they meet are rounded.
#pragma once

#include "cpu/eight_bit/gradient_stage.hpp"

namespace tandem::cpu::gradients {

inline float row_statistic(const Operand& x, const Head& h, std::int64_t i, std::int64_t head) {
  return *reinterpret_cast<const float*>(element(x, h.batch, h.queries.begin + i, head));
}

/// scale * q . mean, which the removal of K's mean takes off a row's logits.
inline float shift_of(const Head& h, std::int64_t i, std::int64_t head) {
  if (!h.recipe.smooth_k) return 0.0F;
  read_row(h.p.q, h.batch, h.queries.begin + i, head, h.p.head_dim_qk, h.m.rows);
  double sum = 0.0;
  for (std::int64_t c = 0; c < h.p.head_dim_qk; ++c)
    sum += static_cast<double>(h.m.rows[c]) * static_cast<double>(h.m.mean[c]);
  return static_cast<float>(sum * static_cast<double>(h.p.scale));
}

/// The sum of rounded dO times rotated out, less dLSE.
inline float delta_of(const Head& h, std::int64_t first, std::int64_t i, std::int64_t head) {
  read_row(h.p.out, h.batch, h.queries.begin + first + i, head, h.p.head_dim_v, h.m.rows);
  rotate_row(h.m.rows, h.p.head_dim_v, false);
  double sum = 0.0;
  for (std::int64_t c = 0; c < h.p.head_dim_v; ++c)
    sum += static_cast<double>(h.m.rows[c]) * static_cast<double>(h.m.dout.values[i * h.m.v_columns + c]);
  const float delta = static_cast<float>(sum * static_cast<double>(h.m.dout.scales[i]));
  return h.p.dlse.given() ? delta - row_statistic(h.p.dlse, h, first + i, head) : delta;
}

/// r: the row's largest P over the power of two that is next to the root of it; 0 if the row sees no key, NaN
/// if P is. Over r the largest P is a power of two, which e4m3 has: rows of equal logits lose nothing.
inline float root_of(const Head& h, std::int64_t i, std::int64_t head) {
  constexpr float half_log2_e = 0x1.715476p-1F;
  const float largest = row_statistic(h.p.max_logits, h, i, head);
  if (largest == -std::numeric_limits<float>::infinity()) return 0.0F;
  const float log_p = std::clamp(largest - row_statistic(h.p.lse, h, i, head), -44.0F, 44.0F);
  if (std::isnan(log_p)) return log_p;
  return std::ldexp(std::exp(log_p), -static_cast<int>(std::nearbyint(log_p * half_log2_e)));
}

/// What the row's gradient of the LSE wants of the scale of dS: as a product of s8 rows is some 2^14.
inline float dlse_of(const Head& h, std::int64_t i, std::int64_t head) {
  if (!h.p.dlse.given()) return 0.0F;
  const float dlse = std::abs(row_statistic(h.p.dlse, h, i, head));
  return std::isfinite(dlse) ? 0x1p-14F * dlse : 0.0F;
}

/// V: the largest scale of V, if strict of the keys up to the last that row i sees.
inline float largest_v_scale(const Head& h, std::int64_t i) {
  const std::int64_t end =
      h.strict() ? visible_keys(window_of(h.p, h.batch), i, h.queries.used, h.keys.used).last : h.keys.used;
  return end > 0 ? h.m.largest_v[end - 1] : 0.0F;
}

/// The smallest power of two that is at least x; 1 of 0.
inline double power_of_two(double x) {
  int exponent = 0;
  const double rest = std::frexp(x, &exponent);
  return rest > 0.0 ? std::ldexp(1.0, rest > 0.5 ? exponent : exponent - 1) : 1.0;
}

/// The Euclidean norm of a row, which no rotation changes.
inline double norm_of(const Operand& x, const Head& h, std::int64_t i, std::int64_t head, std::int64_t dim) {
  read_row(x, h.batch, h.queries.begin + i, head, dim, h.m.rows);
  double squares = 0.0;
  for (std::int64_t c = 0; c < dim; ++c)
    squares += static_cast<double>(h.m.rows[c]) * static_cast<double>(h.m.rows[c]);
  return std::sqrt(squares);
}

/// T and T', from norms. Rows that hold what is no number count for nothing.
inline Units find_units(const Head& h) {
  double dout_largest = 0.0;
  double q_largest = 0.0;
  const std::int64_t step = h.strict() ? 1 : tile_rows;
  for (std::int64_t head = h.kv_head * h.p.group(); head < (h.kv_head + 1) * h.p.group(); ++head) {
    for (std::int64_t first = 0; first < h.queries.used; first += step) {
      double of_dout = 0.0;
      double of_q = 0.0;
      double of_dlse = 0.0;
      for (std::int64_t i = first; i < std::min(first + step, h.queries.used); ++i) {
        const auto root = static_cast<double>(root_of(h, i, head));
        if (root == 0.0) continue;
        of_dlse = std::max(of_dlse, static_cast<double>(dlse_of(h, i, head)));
        const double dout = norm_of(h.p.dout, h, i, head, h.p.head_dim_v);
        const double q = norm_of(h.p.q, h, i, head, h.p.head_dim_qk);
        if (!std::isfinite(dout) || !std::isfinite(q) || std::isnan(root)) continue;
        of_dout = std::max(of_dout, dout);
        of_q = std::max(of_q, q * root);
        dout_largest = std::max(dout_largest, dout * root);
      }
      const auto v = static_cast<double>(largest_v_scale(h, first));
      const double of_ds = std::max(of_dout * v / static_cast<double>(largest_s8), of_dlse);
      q_largest = std::max(q_largest, of_q * of_ds);
    }
  }
  constexpr auto limit = static_cast<double>(largest_e4m3);
  return {.dout = power_of_two(dout_largest / limit), .q = power_of_two(q_largest / limit)};
}

/// E of the block's rows: the scale of dO times V, or what gradients of the LSE want.
inline void find_ds_scales(const Head& h, std::int64_t head, std::int64_t first, std::int64_t count) {
  const Memory& m = h.m;
  float of_block = 0.0F;
  for (std::int64_t i = 0; i < count; ++i) {
    const float of_dout = m.dout.scales[i] * largest_v_scale(h, first + i);
    const float of_dlse = m.root[i] == 0.0F ? 0.0F : dlse_of(h, first + i, head);
    m.ds_scale[i] = of_dout > of_dlse ? of_dout : of_dlse;  // of a row that is NaN the latter
    of_block = std::max(of_block, m.ds_scale[i]);
  }
  constexpr float smallest = 0x1p-100F;
  for (std::int64_t i = 0; i < count; ++i) {
    if (!h.strict()) m.ds_scale[i] = of_block;
    if (m.ds_scale[i] < smallest) m.ds_scale[i] = 0.0F;
  }
}

inline void to_columns(const float* rows, std::int64_t columns, float* to) {
  for (std::int64_t i = 0; i < tile_rows; ++i) {
    for (std::int64_t c = 0; c < columns; ++c) to[c * tile_rows + i] = rows[i * columns + c];
  }
}

/// dO of `count` rows in s8 and e4m3, and what follows from it.
inline void stage_dout(const Head& h, std::int64_t head, std::int64_t first, std::int64_t count) {
  const Memory& m = h.m;
  float factors[tile_rows];
  for (std::int64_t i = 0; i < count; ++i) {
    m.root[i] = root_of(h, first + i, head);
    factors[i] = static_cast<float>(static_cast<double>(m.root[i]) / h.units.dout);
  }
  QuantizeRows dout = h.rows_of(h.p.dout, h.queries.begin + first, head, count, h.p.head_dim_v);
  dout.rotate = h.recipe.rotate_v;
  quantize_rows(h, dout, h.recipe.v_scales, true, m.v_columns, m.dout);
  round_rows(h, count, h.p.head_dim_v, factors, nullptr, m.v_columns, m.dout_e4m3);
  to_columns(m.dout.values, m.v_columns, m.dout_in_columns);
  find_ds_scales(h, head, first, count);
}

/// Q likewise.
inline void stage_q(const Head& h, std::int64_t head, std::int64_t first, std::int64_t count) {
  const Memory& m = h.m;
  float factors[tile_rows];
  for (std::int64_t i = 0; i < count; ++i)
    factors[i] = m.ds_scale[i] * static_cast<float>(static_cast<double>(m.root[i]) / h.units.q);
  QuantizeRows q = h.rows_of(h.p.q, h.queries.begin + first, head, count, h.p.head_dim_qk);
  q.rotate = h.recipe.rotate_qk;
  quantize_rows(h, q, h.recipe.qk_scales, true, m.qk_columns, m.q);
  round_rows(h, count, h.p.head_dim_qk, factors, nullptr, m.qk_columns, m.q_e4m3);
  to_columns(m.q.values, m.qk_columns, m.q_in_columns);
}

/// `count` rows of Q and dO in 8 bits, and of each row LSE without K's mean, delta and factors. All pairs of
/// a row are NaN by its LSE if any is.
inline void stage_queries(const Head& h, std::int64_t head, std::int64_t first, std::int64_t count) {
  const Memory& m = h.m;
  stage_dout(h, head, first, count);
  stage_q(h, head, first, count);
  for (float* line : {m.lse, m.delta, m.q_factor, m.p_factor, m.ds_factor})
    std::fill(line, line + tile_rows, 0.0F);
  std::fill(m.root + count, m.root + tile_rows, 0.0F);
  for (std::int64_t i = 0; i < count; ++i) {
    if (m.root[i] == 0.0F) continue;
    const bool spoilt = std::isnan(m.root[i] + m.q.scales[i] + m.dout.scales[i]);
    m.lse[i] = spoilt ? std::numeric_limits<float>::quiet_NaN()
                      : row_statistic(h.p.lse, h, first + i, head) - shift_of(h, first + i, head);
    if (std::isnan(m.root[i])) m.root[i] = 1.0F;
    m.delta[i] = delta_of(h, first, i, head);
    m.q_factor[i] = m.q.scales[i] * h.p.scale;
    m.p_factor[i] = e4m3_p_range / m.root[i];
    m.ds_factor[i] = m.ds_scale[i] > 0.0F ? ds_unit / (m.root[i] * m.ds_scale[i]) : 0.0F;
  }
  std::memset(m.dq, 0, static_cast<std::size_t>(tile_rows * m.qk_columns) * sizeof(float));
}

}  // namespace tandem::cpu::gradients
