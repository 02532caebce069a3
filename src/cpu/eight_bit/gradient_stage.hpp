// What the backward pass in 8 bits (gradients.cpp) reads and writes: rows in 8 bits, and the memory that a
// thread has for them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/common/convert.hpp"
#include "cpu/common/operand.hpp"
#include "cpu/common/workspace.hpp"
#include "cpu/eight_bit/gradient_products.hpp"
#include "cpu/eight_bit/tile.hpp"
#include "cpu/quantize/mean.hpp"
#include "problem/problem.hpp"
#include "problem/recipe.hpp"

namespace tandem::cpu::gradients {

constexpr std::int64_t tile_rows = quant_block;
/// What entries of dS, over scales of rows, are multiplied by: products of s8 rows, some 2^14, become e4m3.
constexpr float ds_unit = 0x1p-10F;

inline std::int64_t whole_blocks(std::int64_t rows) {
  return (rows + tile_rows - 1) / tile_rows * tile_rows;
}

/// A tensor of one head in s8: whole numbers [row][columns], zeros up to whole columns and tiles, and the
/// scale of each row, NaN of one that holds what is no number (of V, of all of its block).
struct Quantized {
  float* values = nullptr;
  float* scales = nullptr;
};

/// What a thread computes a KV head in.
struct Memory {
  std::int64_t qk_columns, v_columns;
  Quantized k, v;     ///< the sequence's
  float* k_e4m3;      ///< likewise, times half of k's scales
  float* largest_v;   ///< likewise: of v's scales, of keys up to this one
  float *dk, *dv;     ///< likewise, sums, rotated
  Quantized q, dout;  ///< a block of queries', as all below
  float *q_e4m3, *dout_e4m3;
  float *q_in_columns, *dout_in_columns;
  float *lse, *delta;
  float *root, *ds_scale;                  ///< P and dS are divided by them before they are rounded: r, and E
  float *q_factor, *p_factor, *ds_factor;  ///< multiply logits, P and dS
  float* dq;
  float *p, *ds;  ///< [key][query]
  float *mean, *rows;
  std::uint8_t* codes;
  std::size_t bytes = 0;

  Memory(const Problem& p_, std::byte* at)
      : qk_columns(whole_columns(p_.head_dim_qk)), v_columns(whole_columns(p_.head_dim_v)) {
    const std::int64_t keys = whole_blocks(p_.rows_k);
    const std::int64_t columns = std::max(qk_columns, v_columns);
    const auto take = [&](float*& to, std::int64_t count) {
      to = reinterpret_cast<float*>(at + bytes);
      bytes += whole_lines(static_cast<std::size_t>(count) * sizeof(float));
    };
    const auto take_quantized = [&](Quantized& to, std::int64_t count, std::int64_t of_row) {
      take(to.values, count * of_row);
      take(to.scales, count);
    };
    take_quantized(k, keys, qk_columns);
    take_quantized(v, keys, v_columns);
    take(k_e4m3, keys * qk_columns);
    take(largest_v, keys);
    take(dk, keys * qk_columns);
    take(dv, keys * v_columns);
    take_quantized(q, tile_rows, qk_columns);
    take_quantized(dout, tile_rows, v_columns);
    for (float** of_q : {&q_e4m3, &q_in_columns, &dq}) take(*of_q, tile_rows * qk_columns);
    for (float** of_dout : {&dout_e4m3, &dout_in_columns}) take(*of_dout, tile_rows * v_columns);
    for (float** tile : {&p, &ds}) take(*tile, tile_rows * tile_rows);
    take(rows, tile_rows * columns);
    for (float** line : {&lse, &delta, &root, &ds_scale, &q_factor, &p_factor, &ds_factor})
      take(*line, tile_rows);
    take(mean, qk_columns);
    float* place = nullptr;
    take(place, tile_rows * columns);
    codes = reinterpret_cast<std::uint8_t*>(place);
  }
};

/// Powers of two over which rows of dO and of Q are rounded to e4m3, of a KV head: T and T'.
struct Units {
  double dout = 1.0;
  double q = 1.0;
};

/// One KV head of one sequence.
struct Head {
  const Problem& p;
  const Recipe& recipe;
  const QuantizeKernel& kernel;
  const Memory& m;
  std::int64_t batch;
  std::int64_t kv_head;
  Rows queries, keys;
  Units units;

  [[nodiscard]] bool strict() const { return recipe.qk_scales == ScaleGroup::row; }
  [[nodiscard]] QuantizeRows rows_of(const Operand& x, std::int64_t row, std::int64_t head,
                                     std::int64_t count, std::int64_t dim) const {
    return {.data = element(x, batch, row, head),
            .dtype = x.dtype,
            .stride = x.row_stride,
            .rows = static_cast<int>(count),
            .dim = static_cast<int>(dim),
            .scratch = m.rows};
  }
};

/// Up to a tile of rows in s8. In h.m.rows they stay as they were before they were rounded.
inline void quantize_rows(const Head& h, const QuantizeRows& rows, ScaleGroup group, bool markers,
                          std::int64_t columns, const Quantized& to) {
  h.kernel.quantize(rows, {.type = OperandType::s8,
                           .group = group,
                           .out = h.m.codes,
                           .out_stride = rows.dim,
                           .scales = to.scales,
                           .nan_markers = markers});
  std::memset(to.values, 0, static_cast<std::size_t>(tile_rows * columns) * sizeof(float));
  for (std::int64_t i = 0; i < rows.rows; ++i) {
    const std::uint8_t* const codes = h.m.codes + i * rows.dim;
    for (std::int64_t c = 0; c < rows.dim; ++c)
      to.values[i * columns + c] = static_cast<float>(static_cast<std::int8_t>(codes[c]));
    if (std::signbit(to.scales[i])) to.scales[i] = std::numeric_limits<float>::quiet_NaN();
  }
  std::fill(to.scales + rows.rows, to.scales + tile_rows, 0.0F);
}

/// Rows of h.m.rows in e4m3, each times its factor, and after that times `unit` of it if there are any. Rows
/// that hold what is no number are 0: their pairs are NaN by the LSE.
inline void round_rows(const Head& h, std::int64_t count, std::int64_t dim, const float* factors,
                       const float* units, std::int64_t columns, float* to) {
  std::memset(to, 0, static_cast<std::size_t>(tile_rows * columns) * sizeof(float));
  for (std::int64_t i = 0; i < count; ++i) {
    const float* const from = h.m.rows + i * dim;
    float nothing = 0.0F;  // NaN where a number is none
    for (std::int64_t c = 0; c < dim; ++c) nothing += from[c] * 0.0F;
    if (nothing != 0.0F || !(factors[i] > 0.0F)) continue;
    float* const row = to + i * columns;
    for (std::int64_t c = 0; c < dim; ++c) row[c] = from[c] * factors[i];
    for (std::int64_t c = 0; c < columns; c += gradient_columns) {
      ColumnLanes x = lanes_at(row + c);
      round_to_e4m3(x);
      if (units != nullptr) x *= units[i];
      std::memcpy(row + c, &x, sizeof x);
    }
  }
}

inline void find_mean(const Head& h) {
  const std::int64_t dim = h.p.head_dim_qk;
  const MeanKeys sample(h.keys.used, true);
  double sums[max_eight_bit_head_dim] = {};
  for (std::int64_t block = 0; block * tile_rows < h.keys.used; block += sample.step()) {
    float in_block[max_eight_bit_head_dim] = {};
    sample.add(h.kernel, block, in_block, [&](std::int64_t first, std::int64_t count) {
      return h.rows_of(h.p.k, h.keys.begin + first, h.kv_head, count, dim);
    });
    for (std::int64_t c = 0; c < dim; ++c) sums[c] += static_cast<double>(in_block[c]);
  }
  for (std::int64_t c = 0; c < dim; ++c) {
    h.m.mean[c] = h.keys.used > 0 ? static_cast<float>(sums[c] / static_cast<double>(sample.count())) : 0.0F;
  }
}

inline void quantize_keys(const Head& h) {
  const Memory& m = h.m;
  float largest = 0.0F;
  if (h.recipe.smooth_k) find_mean(h);
  for (std::int64_t first = 0; first < h.keys.used; first += tile_rows) {
    const std::int64_t count = std::min(tile_rows, h.keys.used - first);
    const std::int64_t row = h.keys.begin + first;
    QuantizeRows k = h.rows_of(h.p.k, row, h.kv_head, count, h.p.head_dim_qk);
    k.mean = h.recipe.smooth_k ? m.mean : nullptr;
    k.rotate = h.recipe.rotate_qk;
    float* const scales = m.k.scales + first;
    quantize_rows(h, k, h.recipe.qk_scales, true, m.qk_columns,
                  {.values = m.k.values + first * m.qk_columns, .scales = scales});
    float factors[tile_rows];
    float units[tile_rows];
    for (std::int64_t i = 0; i < count; ++i) {
      factors[i] = scales[i] > 0.0F ? 2.0F / scales[i] : 0.0F;
      units[i] = 0.5F * scales[i];
    }
    round_rows(h, count, h.p.head_dim_qk, factors, units, m.qk_columns, m.k_e4m3 + first * m.qk_columns);
    QuantizeRows v = h.rows_of(h.p.v, row, h.kv_head, count, h.p.head_dim_v);
    v.rotate = h.recipe.rotate_v;
    quantize_rows(h, v, h.recipe.v_scales, false, m.v_columns,
                  {.values = m.v.values + first * m.v_columns, .scales = m.v.scales + first});
    for (std::int64_t j = first; j < first + count; ++j) {
      largest = m.v.scales[j] > largest ? m.v.scales[j] : largest;
      m.largest_v[j] = largest;
    }
  }
}

/// Random signs and Hadamard matrices (recipe.hpp), or `back` from there.
inline void rotate_row(float* x, std::int64_t dim, bool back) {
  const auto signs = [&] {
    for (std::int64_t c = 0; c < dim; ++c) x[c] *= rotation_sign(static_cast<int>(c));
  };
  if (!back) signs();
  for (std::int64_t first = 0; first < dim;) {
    const std::int64_t size = rotation_block(static_cast<int>(first), static_cast<int>(dim));
    for (std::int64_t half = 1; half < size; half *= 2) {
      for (std::int64_t i = 0; i < size; ++i) {
        if ((i & half) != 0) continue;
        const float a = x[first + i];
        const float b = x[first + i + half];
        x[first + i] = a + b;
        x[first + i + half] = a - b;
      }
    }
    const float factor = 1.0F / std::sqrt(static_cast<float>(size));
    for (std::int64_t i = 0; i < size; ++i) x[first + i] *= factor;
    first += size;
  }
  if (back) signs();
}

template <typename F>
inline void with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::f16: return f(f16{});
    default: return f(bf16{});
  }
}

inline void read_row(const Operand& x, std::int64_t batch, std::int64_t row, std::int64_t head,
                     std::int64_t dim, float* to) {
  with_type(x.dtype, [&]<typename T>(T) {
    const auto* const from = reinterpret_cast<const T*>(element(x, batch, row, head));
    for (std::int64_t c = 0; c < dim; ++c) to[c] = to_f32(from[c]);
  });
}

/// Writes a row of a gradient: rotated back, times `factor`, plus `more` times the mean if there is one.
inline void write_row(const Operand& x, std::int64_t batch, std::int64_t row, std::int64_t head,
                      std::int64_t dim, float* from, float factor, const float* mean = nullptr,
                      float more = 0.0F) {
  rotate_row(from, dim, true);
  with_type(x.dtype, [&]<typename T>(T) {
    auto* const to = reinterpret_cast<T*>(element(x, batch, row, head));
    for (std::int64_t c = 0; c < dim; ++c)
      to[c] = from_f32<T>(from[c] * factor + (mean != nullptr && more != 0.0F ? more * mean[c] : 0.0F));
  });
}

}  // namespace tandem::cpu::gradients
