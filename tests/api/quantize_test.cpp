// tandem::quantize: groups, layouts, mean and rotation, errors.
#include "tandem/quantize.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu/common/convert.hpp"
#include "harness/error_of.hpp"

namespace tandem::test {
namespace {

constexpr std::int64_t batch = 2;
constexpr std::int64_t rows = 150;
constexpr std::int64_t heads = 3;
constexpr std::int64_t dim = 16;

/// x as (batch, rows, heads, dim), stored (batch, heads, rows, dim), and everything that quantize writes.
struct Tensors {
  std::vector<float> memory = std::vector<float>(batch * rows * heads * dim);
  std::vector<std::uint8_t> codes = std::vector<std::uint8_t>(memory.size(), 0xEE);
  std::vector<float> scales;
  std::vector<float> mean = std::vector<float>(batch * heads * dim, -1.0F);
  DType dtype;

  Tensors(DType codes_dtype, std::size_t scale_count) : scales(scale_count, -1.0F), dtype(codes_dtype) {
    for (std::size_t i = 0; i < memory.size(); ++i) {
      memory[i] = static_cast<float>(static_cast<int>(i * 7919 % 2003) - 1000) / 300.0F + 1.0F;
    }
  }
  [[nodiscard]] static std::size_t at(std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t c) {
    return static_cast<std::size_t>(((b * heads + head) * rows + row) * dim + c);
  }
  template <typename View>
  [[nodiscard]] View view(void* data, DType type) const {
    View t(data, type, {batch, rows, heads, dim});
    t.stride = {heads * rows * dim, dim, rows * dim, 1};
    return t;
  }
  [[nodiscard]] QuantizeArgs args(Granularity granularity, std::initializer_list<std::int64_t> scales_shape) {
    QuantizeArgs a;
    a.x = view<ConstTensor>(memory.data(), DType::f32);
    a.codes = view<Tensor>(codes.data(), dtype);
    a.scales = Tensor(scales.data(), DType::f32, scales_shape);
    a.granularity = granularity;
    return a;
  }
  [[nodiscard]] float code(std::size_t i) const {
    return dtype == DType::s8 ? static_cast<float>(static_cast<std::int8_t>(codes[i]))
                              : to_f32(e4m3{codes[i]});
  }
};

struct Grouping {
  Granularity granularity;
  std::vector<std::int64_t> shape;
  std::size_t (*index)(std::int64_t b, std::int64_t row, std::int64_t head);
};

const std::vector<Grouping>& groupings() {
  using I = std::int64_t;
  static const std::vector<Grouping> all{
      {Granularity::tensor, {1}, [](I, I, I) { return std::size_t{0}; }},
      {Granularity::head,
       {batch, heads},
       [](I b, I, I h) { return static_cast<std::size_t>(b * heads + h); }},
      {Granularity::block,
       {batch, heads, 2},
       [](I b, I row, I h) { return static_cast<std::size_t>((b * heads + h) * 2 + row / 128); }},
      {Granularity::row, {batch, heads, rows}, [](I b, I row, I h) {
         return static_cast<std::size_t>((b * heads + h) * rows + row);
       }}};
  return all;
}

template <typename F>
void for_each_element(const F& f) {
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t head = 0; head < heads; ++head) {
        for (std::int64_t c = 0; c < dim; ++c) f(b, row, head, c);
      }
    }
  }
}

Tensor shaped(const std::vector<std::int64_t>& shape, float* data) {
  if (shape.size() == 1) return {data, DType::f32, {shape[0]}};
  if (shape.size() == 2) return {data, DType::f32, {shape[0], shape[1]}};
  return {data, DType::f32, {shape[0], shape[1], shape[2]}};
}

TEST(QuantizeApi, EveryGroupHasItsScale) {
  for (const DType dtype : {DType::e4m3, DType::s8}) {
    const float limit = dtype == DType::s8 ? 127.0F : 448.0F;
    for (const Grouping& g : groupings()) {
      std::int64_t count = 1;
      for (const std::int64_t n : g.shape) count *= n;
      Tensors t(dtype, static_cast<std::size_t>(count));
      QuantizeArgs args = t.args(g.granularity, {1});
      args.scales = shaped(g.shape, t.scales.data());
      quantize(args, {.threads = 2});
      std::vector<float> largest(t.scales.size(), 0.0F);
      for_each_element([&](auto b, auto row, auto head, auto c) {
        float& most = largest[g.index(b, row, head)];
        most = std::fmax(most, std::abs(t.memory[Tensors::at(b, row, head, c)]));
      });
      for_each_element([&](auto b, auto row, auto head, auto c) {
        const std::size_t group = g.index(b, row, head);
        const std::size_t i = Tensors::at(b, row, head, c);
        ASSERT_EQ(t.scales[group], largest[group] / limit);
        // Half a code's distance: of s8 half a scale; of e4m3 a sixteenth of the value.
        const float bound = dtype == DType::s8
                                ? 0.5F * t.scales[group]
                                : std::fmax(std::abs(t.memory[i]) / 16.0F, t.scales[group] * 0x1p-10F);
        ASSERT_NEAR(t.code(i) * t.scales[group], t.memory[i], bound * 1.0001F);
      });
    }
  }
}

TEST(QuantizeApi, MeanIsTakenOffAndRotationSpreads) {
  Tensors t(DType::s8, static_cast<std::size_t>(batch * heads * rows));
  QuantizeArgs args = t.args(Granularity::row, {batch, heads, rows});
  args.mean = Tensor(t.mean.data(), DType::f32, {batch, heads, dim});
  for (const bool hadamard : {false, true}) {
    args.hadamard = hadamard;
    quantize(args);
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t head = 0; head < heads; ++head) {
        double norm = 0.0;
        double norm_of_quantized = 0.0;
        for (std::int64_t c = 0; c < dim; ++c) {
          double sum = 0.0;
          for (std::int64_t row = 0; row < rows; ++row)
            sum += static_cast<double>(t.memory[Tensors::at(b, row, head, c)]);
          const auto at = static_cast<std::size_t>((b * heads + head) * dim + c);
          EXPECT_NEAR(t.mean[at], sum / rows, 1e-5);
          const std::size_t i = Tensors::at(b, 5, head, c);
          norm += std::pow(static_cast<double>(t.memory[i] - t.mean[at]), 2.0);
          norm_of_quantized += std::pow(static_cast<double>(t.code(i)), 2.0);
        }
        const auto scale =
            static_cast<double>(t.scales[static_cast<std::size_t>((b * heads + head) * rows + 5)]);
        EXPECT_NEAR(std::sqrt(norm_of_quantized) * scale, std::sqrt(norm), 0.02 * std::sqrt(norm));
      }
    }
  }
}

TEST(QuantizeApi, NaNIsTheGroups) {
  for (const Granularity granularity : {Granularity::tensor, Granularity::head}) {
    Tensors t(DType::s8, granularity == Granularity::tensor ? 1 : batch * heads);
    t.memory[Tensors::at(1, 3, 2, 0)] = std::numeric_limits<float>::quiet_NaN();
    QuantizeArgs args = t.args(granularity, {1});
    if (granularity == Granularity::head) args.scales = Tensor(t.scales.data(), DType::f32, {batch, heads});
    quantize(args);
    EXPECT_TRUE(std::isnan(t.scales.back()));
    if (granularity == Granularity::head) {
      EXPECT_FALSE(std::isnan(t.scales.front()));
    }
  }
}

TEST(QuantizeApi, ErrorsComeBeforeAnythingIsWritten) {
  const auto refused = [](void (*break_it)(QuantizeArgs&), const char* message) {
    Tensors t(DType::e4m3, 6);
    QuantizeArgs args = t.args(Granularity::head, {batch, heads});
    break_it(args);
    EXPECT_EQ(error_of(Status::invalid_argument, [&] { quantize(args); }), message);
    EXPECT_EQ(t.codes, std::vector<std::uint8_t>(t.codes.size(), 0xEE));
    EXPECT_EQ(t.scales, std::vector<float>(t.scales.size(), -1.0F));
  };
  refused([](QuantizeArgs& a) { a.x = {}; },
          "x is missing; pass a tensor of shape (batch, seqlen, heads, head_dim)");
  refused([](QuantizeArgs& a) { a.x.dtype = DType::e4m3; }, "x is e4m3; convert it to f32, f16 or bf16");
  refused([](QuantizeArgs& a) { a.codes.dtype = DType::f32; }, "codes is f32; convert it to e4m3 or s8");
  refused([](QuantizeArgs& a) { a.granularity = Granularity::row; },
          "scales has 2 dimensions; it must be (batch, heads, seqlen)");
  refused([](QuantizeArgs& a) { a.granularity = static_cast<Granularity>(9); },
          "granularity is 9; it must be tensor (0), head (1), block (2) or row (3)");
  refused([](QuantizeArgs& a) { a.scales.stride[1] = 0; },
          "scales of shape (2, 3) and strides (3, 0) overlaps itself in dimension 1; every element of an "
          "output needs memory of its own");
  refused([](QuantizeArgs& a) { a.x.device.kind = Device::Kind::cuda; },
          "codes is on cpu but x is on cuda:0; move it there");
  refused([](QuantizeArgs& a) { a.x.device.kind = static_cast<Device::Kind>(7); },
          "x is on a device of kind 7; use cpu (0) or cuda (1)");
}

/// A rank is refused before as many sizes are read: every tensor has room for four.
TEST(QuantizeApi, WildRanksAreRefused) {
  const auto refused = [](auto member, const char* name) {
    Tensors t(DType::e4m3, 6);
    QuantizeArgs args = t.args(Granularity::head, {batch, heads});
    args.mean = Tensor(t.mean.data(), DType::f32, {batch, heads, dim});
    (args.*member).rank = 100'000'000;
    const std::string said = error_of(Status::invalid_argument, [&] { quantize(args); });
    EXPECT_TRUE(said.starts_with(std::string(name) + " has 100000000 dimensions; it must be ")) << said;
  };
  refused(&QuantizeArgs::x, "x");
  refused(&QuantizeArgs::codes, "codes");
  refused(&QuantizeArgs::scales, "scales");
  refused(&QuantizeArgs::mean, "mean");
}

}  // namespace
}  // namespace tandem::test
