// The quantiser of every instruction set: quantized values and scales by their definition, the rotation, the
// corners; and that sums of s8 products are the 32-bit integers they should be.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "api/make_problem.hpp"
#include "cpu/cpu.hpp"
#include "cpu/targets/kernels.hpp"
#include "harness/call.hpp"
#include "harness/changes.hpp"
#include "harness/element.hpp"

namespace tandem::harness {
namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

/// Quantized values and scales of f32 rows.
struct Quantized {
  OperandType type;
  std::vector<std::uint8_t> bytes;
  std::vector<float> scales;
  int dim;

  [[nodiscard]] double code(int row, int c) const {
    return decode(type == OperandType::s8 ? DType::s8 : DType::e4m3, bytes.data(), row * dim + c);
  }
};

Quantized quantize(cpu::Target target, const std::vector<float>& x, int dim, OperandType type,
                   ScaleGroup group, bool rotate = false, const float* mean = nullptr, float largest = 0.0F) {
  const int rows = static_cast<int>(x.size()) / dim;
  Quantized q{.type = type, .bytes = std::vector<std::uint8_t>(x.size()), .scales = {}, .dim = dim};
  q.scales.assign(static_cast<std::size_t>(group == ScaleGroup::channel ? dim : rows), -1.0F);
  std::vector<float> scratch(x.size());
  cpu::kernels(target).quantize.quantize({.data = x.data(),
                                          .dtype = DType::f32,
                                          .stride = dim,
                                          .rows = rows,
                                          .dim = dim,
                                          .mean = mean,
                                          .rotate = rotate,
                                          .scratch = scratch.data()},
                                         {.type = type,
                                          .group = group,
                                          .largest = largest,
                                          .out = q.bytes.data(),
                                          .out_stride = dim,
                                          .scales = q.scales.data()});
  return q;
}

std::vector<float> normal_rows(int rows, int dim, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> x;
  for (int i = 0; i < rows * dim; ++i) x.push_back(static_cast<float>(random.normal()));
  return x;
}

/// Which elements share the scale of (row, c).
bool same_group(ScaleGroup group, int row, int c, int other_row, int other_c) {
  return group == ScaleGroup::row ? row == other_row : (group == ScaleGroup::channel ? c == other_c : true);
}

TEST(Quantize, ValuesAndScalesAreThoseOfTheDefinition) {
  constexpr int rows = 19;
  constexpr int dim = 40;
  const std::vector<float> x = normal_rows(rows, dim, 3);
  const auto at = [&](int row, int c) { return x[static_cast<std::size_t>(row * dim + c)]; };
  for (const cpu::Target target : cpu::available_targets()) {
    for (const OperandType type : {OperandType::e4m3, OperandType::s8}) {
      for (const ScaleGroup group : {ScaleGroup::block, ScaleGroup::row, ScaleGroup::channel}) {
        const Quantized q = quantize(target, x, dim, type, group);
        const float limit = type == OperandType::s8 ? 127.0F : 448.0F;
        for (int row = 0; row < rows; ++row) {
          for (int c = 0; c < dim; ++c) {
            float largest = 0.0F;
            for (int r = 0; r < rows; ++r) {
              for (int n = 0; n < dim; ++n) {
                if (same_group(group, row, c, r, n)) largest = std::fmax(largest, std::abs(at(r, n)));
              }
            }
            ASSERT_EQ(q.scales[static_cast<std::size_t>(group == ScaleGroup::channel ? c : row)],
                      largest / limit);
            const float scaled = std::fmin(std::fmax(at(row, c) * (limit / largest), -limit), limit);
            const double want = type == OperandType::s8 ? std::nearbyint(scaled)
                                                        : rounded(DType::e4m3, static_cast<double>(scaled));
            ASSERT_EQ(q.code(row, c), want) << cpu::name_of(target) << " row " << row << " channel " << c;
          }
        }
      }
    }
  }
}

/// Every code, its neighbours and the points between: e4m3 rounds to nearest even, subnormals included.
TEST(Quantize, RoundsToEveryE4m3Code) {
  std::vector<float> x{448.0F};  // the scale is 1
  for (int code = 0; code < 0x7E; ++code) {
    const auto low = static_cast<std::uint8_t>(code);
    const auto high = static_cast<std::uint8_t>(code + 1);
    const double a = decode(DType::e4m3, &low, 0);
    const double b = decode(DType::e4m3, &high, 0);
    for (const double share : {0.0, 0.25, 0.5, 0.500001, 0.75}) {
      const auto value = static_cast<float>(a + share * (b - a));
      x.push_back(value);
      x.push_back(-value);
    }
  }
  for (const cpu::Target target : cpu::available_targets()) {
    const Quantized q = quantize(target, x, static_cast<int>(x.size()), OperandType::e4m3, ScaleGroup::row);
    for (int i = 0; i < static_cast<int>(x.size()); ++i) {
      const auto value = static_cast<double>(x[static_cast<std::size_t>(i)]);
      ASSERT_EQ(q.code(0, i), rounded(DType::e4m3, value)) << value;
      ASSERT_EQ(std::signbit(q.code(0, i)), std::signbit(value)) << value;
    }
  }
}

TEST(Quantize, SaturatedZeroAndNaN) {
  const float huge = 1e30F;
  for (const cpu::Target target : cpu::available_targets()) {
    for (const OperandType type : {OperandType::e4m3, OperandType::s8}) {
      const double limit = type == OperandType::s8 ? 127.0 : 448.0;
      // A scale from elsewhere may be too small: values saturate.
      const Quantized saturated =
          quantize(target, {huge, -huge, 1.0F, 0.0F}, 4, type, ScaleGroup::head, false, nullptr, 1.0F);
      EXPECT_EQ(saturated.code(0, 0), limit);
      EXPECT_EQ(saturated.code(0, 1), -limit);
      EXPECT_EQ(saturated.code(0, 2), limit);
      // Zeros, and what is too small for its inverse: scale 0 and quantized values 0.
      const Quantized zero = quantize(target, {0.0F, 0.0F, 1e-38F, -0.0F}, 2, type, ScaleGroup::row);
      for (int i = 0; i < 4; ++i) EXPECT_EQ(zero.code(i / 2, i % 2), 0.0);
      EXPECT_EQ(zero.scales, std::vector<float>(2, 0.0F));
      // NaN and infinity: a NaN code, or, where s8 has none, a NaN scale; no other element notices.
      const Quantized nan =
          quantize(target, {nan_value, 1.0F, 2.0F, -std::numeric_limits<float>::infinity(), 2.0F, 1.0F}, 2,
                   type, ScaleGroup::row);
      for (const int row : {0, 1}) {
        const float scale = nan.scales[static_cast<std::size_t>(row)];
        EXPECT_TRUE(std::isnan(static_cast<double>(scale) * nan.code(row, row)));
        EXPECT_TRUE(type == OperandType::s8 || nan.code(row, 1 - row) == 448.0);
      }
      EXPECT_EQ(nan.code(2, 0), limit);
      EXPECT_FALSE(std::isnan(nan.scales[2]));
    }
  }
}

/// Random signs and Hadamard blocks keep inner products and spread an outlier over its block.
TEST(Quantize, RotationIsOrthogonal) {
  for (const int dim : {1, 8, 24, 64, 72, 96, 128, 192, 256}) {
    const std::vector<float> x = normal_rows(2, dim, static_cast<std::uint64_t>(dim));
    std::vector<float> spike(static_cast<std::size_t>(dim), 0.0F);
    spike[0] = 1.0F;
    for (const cpu::Target target : cpu::available_targets()) {
      // Row 0 against row 1, through e4m3's inverse: quantized values of f32 rows cannot show 1e-6, so the
      // scale is read instead.
      std::vector<float> scratch(static_cast<std::size_t>(2 * dim));
      const cpu::QuantizeRows rows{.data = x.data(),
                                   .dtype = DType::f32,
                                   .stride = dim,
                                   .rows = 2,
                                   .dim = dim,
                                   .mean = nullptr,
                                   .rotate = true,
                                   .scratch = scratch.data()};
      static_cast<void>(
          cpu::kernels(target).quantize.largest(rows));  // leaves the rotated rows in its scratch memory
      double before = 0.0;
      double after = 0.0;
      for (std::size_t c = 0; c < static_cast<std::size_t>(dim); ++c) {
        before += static_cast<double>(x[c]) * static_cast<double>(x[static_cast<std::size_t>(dim) + c]);
        after +=
            static_cast<double>(scratch[c]) * static_cast<double>(scratch[static_cast<std::size_t>(dim) + c]);
      }
      EXPECT_NEAR(before, after, 1e-5 * dim);
      const cpu::QuantizeRows one{.data = spike.data(),
                                  .dtype = DType::f32,
                                  .stride = dim,
                                  .rows = 1,
                                  .dim = dim,
                                  .mean = nullptr,
                                  .rotate = true,
                                  .scratch = scratch.data()};
      EXPECT_NEAR(cpu::kernels(target).quantize.largest(one), 1.0 / std::sqrt(rotation_block(0, dim)), 1e-6);
    }
  }
}

/// A window of one key: lse is scale * q_scale * k_scale * (the sum of products of quantized values), from
/// which the integer is read back and compared with a 32-bit sum.
TEST(Quantize, SumsOfIntegerProductsAreExact) {
  constexpr std::int64_t rows = 200;
  for (const std::int64_t dim : {64, 256}) {
    Case c = with({}, {.dtype = DType::bf16, .head_dim_qk = dim, .head_dim_v = 8, .seqlen = rows});
    change(c, {.window = 0, .precision = Precision::int8});
    c.options.strict = true;  // no mean: lse is the product of quantized values alone
    c.options.scale = 1.0F;
    Call call(c);
    for (std::int64_t i = 0; i < rows * dim; ++i)
      call.k.set(i, call.q.get(i) + 0.1 * call.k.get(i));  // large sums
    const auto widened = [](const Box& box) {
      const std::vector<double> values = box.values();
      return std::vector<float>(values.begin(), values.end());
    };
    for (const cpu::Target target : cpu::available_targets()) {
      const Quantized q =
          quantize(target, widened(call.q), static_cast<int>(dim), OperandType::s8, ScaleGroup::row, true);
      const Quantized k =
          quantize(target, widened(call.k), static_cast<int>(dim), OperandType::s8, ScaleGroup::row, true);
      const Problem problem = make_problem(call.forward_args());
      cpu::Config config = cpu::choose(problem, 1);
      config.target = target;
      const cpu::Plan plan(problem, config);
      std::vector<std::byte> workspace(plan.workspace_bytes);
      call.prepare(Pass::forward);
      cpu::run(plan, workspace);
      for (int i = 0; i < rows; ++i) {
        std::int32_t sum = 0;
        for (int n = 0; n < dim; ++n)
          sum += static_cast<std::int32_t>(q.code(i, n)) * static_cast<std::int32_t>(k.code(i, n));
        const auto row = static_cast<std::size_t>(i);
        const double unit = static_cast<double>(q.scales[row]) * static_cast<double>(k.scales[row]);
        ASSERT_EQ(std::llround(call.lse.get(i) / unit), sum) << cpu::name_of(target) << " row " << i;
        ASSERT_GT(sum, 50000);
      }
    }
  }
}

}  // namespace
}  // namespace tandem::harness
