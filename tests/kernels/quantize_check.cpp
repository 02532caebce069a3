#include "quantize_check.hpp"
#include "harness/changes.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "cpu/common/operand.hpp"
#include "cpu/quantize/quantize.hpp"
#include "harness/element.hpp"

namespace tandem::kernel_tests {

using harness::Box;
using harness::Call;
using harness::Case;

namespace {

/// What the CPU makes of one sequence of a tensor.
struct Expected {
  std::int64_t heads, rows, dim, groups;
  std::vector<std::uint8_t> quantized;  ///< [row][head][dim]
  std::vector<float> scales;            ///< [head][group]
  std::vector<float> mean;              ///< [head][dim]

  Expected(const Operand& x, std::int64_t entry, std::int64_t heads_, const Rows& sequence, std::int64_t dim_,
           OperandType to, ScaleGroup group, bool rotate, bool smooth, bool marks)
      : heads(heads_),
        rows(sequence.used),
        dim(dim_),
        groups(group == ScaleGroup::row ? rows : (rows + quant_block - 1) / quant_block) {
    quantized.resize(static_cast<std::size_t>(rows * heads * dim));
    scales.resize(static_cast<std::size_t>(heads * groups));
    mean.resize(static_cast<std::size_t>(smooth ? heads * dim : 0));
    QuantizeProblem problem;
    problem.batch = 1;
    problem.rows = rows;
    problem.heads = heads;
    problem.head_dim = dim;
    problem.x = x;
    problem.x.data = cpu::element(x, entry, sequence.begin, 0);
    problem.codes = {.data = quantized.data(),
                     .dtype = to == OperandType::s8 ? DType::s8 : DType::e4m3,
                     .batch_stride = 0,
                     .row_stride = heads * dim,
                     .head_stride = dim};
    problem.scales = {.data = scales.data(),
                      .dtype = DType::f32,
                      .batch_stride = 0,
                      .row_stride = 1,
                      .head_stride = groups};
    if (smooth)
      problem.mean = {
          .data = mean.data(), .dtype = DType::f32, .batch_stride = 0, .row_stride = 0, .head_stride = dim};
    problem.group = group;
    problem.rotate = rotate;
    problem.nan_markers = marks;
    problem.sampled_mean = true;
    cpu::quantize(problem, cpu::Target::portable, 1);
  }

  [[nodiscard]] std::uint8_t code(std::int64_t head, std::int64_t row, std::int64_t c) const {
    return quantized[static_cast<std::size_t>((row * heads + head) * dim + c)];
  }
  [[nodiscard]] float scale(std::int64_t head, std::int64_t group) const {
    return scales[static_cast<std::size_t>(head * groups + group)];
  }
};

bool same(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

/// One sequence: where it lies on both axes.
struct Place {
  std::int64_t entry;  ///< batch index of the tensor
  Rows rows;
  std::int64_t first_group_block;
};
Place place_of(const Rows& rows, std::int64_t b, bool packed) {
  return {packed ? 0 : b, rows, first_block(static_cast<int>(rows.begin), static_cast<int>(b), packed)};
}

float scale_at(const QuantizedTensor& x, const Place& at, ScaleGroup group, std::int64_t head,
               std::int64_t n) {
  const std::int64_t first = at.first_group_block * (group == ScaleGroup::row ? quant_block : 1);
  return x.scales[at.entry * x.scale_stride.batch + head * x.scale_stride.head +
                  (first + n) * x.scale_stride.group];
}

void check_rows(const QuantizedTensor& x, const Place& at, ScaleGroup group, const Expected& want) {
  for (std::int64_t head = 0; head < want.heads; ++head) {
    for (std::int64_t n = 0; n < want.groups; ++n) {
      const float scale = scale_at(x, at, group, head, n);
      ASSERT_TRUE(same(scale, want.scale(head, n)))
          << "scale " << n << ": " << scale << " " << want.scale(head, n);
    }
    for (std::int64_t row = 0; row < want.rows; ++row) {
      const unsigned char* quantized = x.quantized + at.entry * x.quantized_stride.batch +
                                       head * x.quantized_stride.head +
                                       (at.rows.begin + row) * x.quantized_stride.row;
      for (std::int64_t c = 0; c < quantized_pitch(want.dim); ++c) {
        ASSERT_EQ(quantized[c], c < want.dim ? want.code(head, row, c) : 0)
            << "head " << head << " row " << row << " channel " << c;
      }
    }
  }
}

void check_values(const QuantizedTensor& x, const Place& at, ScaleGroup group, OperandType pv,
                  const Expected& want) {
  const int zero_point = takes_zero_point(pv, group == ScaleGroup::row, want.dim) ? 0x80 : 0;
  const std::int64_t blocks = (want.rows + quant_block - 1) / quant_block;
  const std::int64_t all_groups = group == ScaleGroup::row ? blocks * quant_block : blocks;
  for (std::int64_t head = 0; head < want.heads; ++head) {
    for (std::int64_t n = 0; n < all_groups; ++n) {
      ASSERT_TRUE(same(scale_at(x, at, group, head, n), n < want.groups ? want.scale(head, n) : 0.0F))
          << "scale " << n;
    }
    for (std::int64_t c = 0; c < want.dim; ++c) {
      const unsigned char* quantized = x.quantized + at.entry * x.quantized_stride.batch +
                                       head * x.quantized_stride.head + c * x.quantized_stride.row +
                                       at.first_group_block * quant_block;
      for (std::int64_t i = 0; i < blocks * quant_block; ++i) {
        const std::int64_t key = i / 16 * 16 + v_key_of(static_cast<int>(i % 16));
        ASSERT_EQ(quantized[i] ^ zero_point, key < want.rows ? want.code(head, key, c) : 0)
            << "head " << head << " key " << key << " channel " << c;
      }
    }
  }
}

/// scale * q . mean of every row, and 0 where there is no key.
void check_shift(const Problem& p, const QuantizeParams& params, const Place& at, const Expected& keys) {
  for (std::int64_t head = 0; head < p.heads_q; ++head) {
    const float* const mean = keys.mean.data() + head / p.group() * p.head_dim_qk;
    for (std::int64_t row = 0; row < at.rows.used; ++row) {
      const auto* const q = cpu::element(p.q, at.entry, at.rows.begin + row, head);
      double sum = 0.0;
      double size = 0.0;
      for (std::int64_t c = 0; c < p.head_dim_qk; ++c) {
        const double term = harness::decode(p.q.dtype, q, c) * static_cast<double>(mean[c]);
        sum += term;
        size += std::abs(term);
      }
      const double got = params.shift[at.entry * params.shift_stride.batch + head * params.shift_stride.head +
                                      at.first_group_block * quant_block + row];
      if (!(size < 1e30)) continue;  // more than f32 holds, or no number
      const double scale = static_cast<double>(p.scale);
      ASSERT_NEAR(got, keys.rows > 0 ? sum * scale : 0.0, 1e-6 * size * std::abs(scale))
          << "head " << head << " row " << row;
    }
  }
}

}  // namespace

void check_quantized(const Call& call, const Recipe& recipe, const QuantizeParams& params) {
  const Problem p = call.problem();
  for (std::int64_t b = 0; b < p.batch; ++b) {
    SCOPED_TRACE(fmt::format("sequence {}", b));
    const Place q = place_of(query_rows(p, b), b, p.packed_q);
    const Place k = place_of(key_rows(p, b), b, p.packed_k);
    const Expected queries(p.q, q.entry, p.heads_q, q.rows, p.head_dim_qk, recipe.qk, recipe.qk_scales,
                           recipe.rotate_qk, false, true);
    const Expected keys(p.k, k.entry, p.heads_kv, k.rows, p.head_dim_qk, recipe.qk, recipe.qk_scales,
                        recipe.rotate_qk, recipe.smooth_k, true);
    check_rows(params.q, q, recipe.qk_scales, queries);
    check_rows(params.k, k, recipe.qk_scales, keys);
    if (recipe.smooth_k) check_shift(p, params, q, keys);
    const Expected values(p.v, k.entry, p.heads_kv, k.rows, p.head_dim_v, recipe.pv, recipe.v_scales,
                          recipe.rotate_v, false, false);
    check_values(params.v, k, recipe.v_scales, recipe.pv, values);
  }
}

Case quantize_case(DType dtype, std::int64_t head_dim_qk, std::int64_t head_dim_v) {
  Case c = harness::with({}, {.dtype = dtype, .batch = 2, .heads_q = 4, .heads_kv = 2});
  change(c, {.head_dim_qk = head_dim_qk, .head_dim_v = head_dim_v, .seqlen_q = 150, .seqlen_k = 260});
  c.amplitude = 2.0;
  return c;
}

void make_varlen(Case& c) {
  change(c, {.batch = 5, .packed = true, .lengths_q = {40, 128, 0, 3, 150}});
  change(c, {.lengths_k = {130, 0, 128, 60, 7}, .slack_q = 5, .slack_k = 9, .used_k = {129, 0, 128, 0, 7}});
}

void make_short(Case& c) {
  c.heads_kv = 5;
  c.heads_q = 10;
  c.packed_q = c.packed_k = true;
  c.lengths_q = {1, 16, 17, 0, 33, 64, 2, 65, 3, 5, 1, 130, 4, 9, 0, 7, 2, 8, 1, 1, 2, 16, 3, 10};
  c.lengths_k = {16, 1, 2, 4, 5, 0, 3, 130, 65, 17, 33, 1, 1, 2, 0, 15, 14, 13, 64, 1, 1, 2, 3, 4};
  c.batch = static_cast<std::int64_t>(c.lengths_q.size());
  c.slack_q = 3;
}

void make_unaligned(Case& c) {
  c.q.pad = c.k.pad = c.v.pad = 3;
}

void set_no_numbers(Call& call) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::array<float, 6> values{inf,   -inf,   std::numeric_limits<float>::quiet_NaN(),
                                    3e38F, -1e38F, 1e-38F};
  for (Box* box : {&call.q, &call.k, &call.v}) {
    const auto& shape = box->view().shape;
    const auto set = [&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t channel,
                         double x) {
      box->set(((b * shape[1] + row) * shape[2] + head) * shape[3] + channel, x);
    };
    for (std::int64_t i = 0; i < 6; ++i) {
      set(0, 7 * i, i % 2, 5 * i, static_cast<double>(values[static_cast<std::size_t>(i)]));
    }
    for (std::int64_t channel = 0; channel < 64; ++channel) {
      for (std::int64_t row = 128; row < 150; ++row) set(1, row, 0, channel, channel % 2 == 0 ? 0.0 : -0.0);
      set(1, 3, 0, channel, 1e-35);
      // A NaN whose group has no magnitude of 1: it must not count as one.
      for (std::int64_t row = 0; row < 128; ++row)
        set(1, row, 1, channel, 0.01 * static_cast<double>((row + channel) % 50));
    }
    set(1, 9, 1, 4, std::numeric_limits<double>::quiet_NaN());
  }
}

}  // namespace tandem::kernel_tests
