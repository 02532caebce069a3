// The vector vocabulary of every instruction set that this processor runs, against scalar code and the C
// library.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cpu/common/convert.hpp"
#include "cpu/cpu.hpp"
#include "cpu/simd_probe.hpp"
#include "problem/recipe.hpp"

namespace tandem::cpu {

namespace portable {
extern const SimdProbe probe;
}
#if defined(__x86_64__)
namespace avx2 {
extern const SimdProbe probe;
}
namespace avx512 {
extern const SimdProbe probe;
}
namespace avx512_bf16 {
extern const SimdProbe probe;
}
namespace amx {
extern const SimdProbe probe;
}
namespace amx_emulated {
extern const SimdProbe probe;
}
#elif defined(__aarch64__)
namespace neon {
extern const SimdProbe probe;
}
#endif

namespace {

std::vector<const SimdProbe*> built_probes() {
#if defined(__x86_64__)
  return {&portable::probe,    &avx2::probe, &avx512::probe,
          &avx512_bf16::probe, &amx::probe,  &amx_emulated::probe};
#elif defined(__aarch64__)
  return {&portable::probe, &neon::probe};
#else
  return {&portable::probe};
#endif
}

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

class Simd : public testing::TestWithParam<const SimdProbe*> {
 protected:
  void SetUp() override {
    if (!available(probe().target)) GTEST_SKIP() << "this processor lacks " << name_of(probe().target);
  }
  static const SimdProbe& probe() { return *GetParam(); }
};

TEST_P(Simd, exp2_is_accurate_over_its_range) {
  std::vector<float> x;
  for (float v = -125.9F; v < 127.9F; v += 0.00731F) x.push_back(v);
  std::vector<float> y(x.size());
  probe().exp2(x.data(), y.data(), static_cast<int>(x.size()));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double expected = std::exp2(static_cast<double>(x[i]));
    EXPECT_LE(std::abs(y[i] - expected), 2e-7 * expected) << x[i];
  }
}

TEST_P(Simd, exp2_of_special_values) {
  const std::vector<float> x{0.0F,    -0.0F,  -infinity, infinity, not_a_number,
                             -150.0F, -1e30F, 200.0F,    1e30F,    1.0F};
  std::vector<float> y(x.size());
  probe().exp2(x.data(), y.data(), static_cast<int>(x.size()));
  EXPECT_EQ(y[0], 1.0F);
  EXPECT_EQ(y[1], 1.0F);
  EXPECT_EQ(y[2], 0.0F);
  EXPECT_EQ(y[3], infinity);
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_LT(y[5], 1e-38F);
  EXPECT_EQ(y[6], 0.0F);
  EXPECT_EQ(y[7], infinity);
  EXPECT_EQ(y[8], infinity);
  EXPECT_NEAR(y[9], 2.0F, 4e-7F);
}

/// Linear between its exact values, 1.75 * 2^n among them, so that it errs as the recipe says.
TEST_P(Simd, linear_exp2_is_linear_within_an_octave) {
  std::vector<float> x;
  for (float v = -100.0F; v < 100.0F; v += 0.00731F) x.push_back(v);
  std::vector<float> y(x.size());
  probe().linear_exp2(x.data(), y.data(), static_cast<int>(x.size()));
  double mean = 0.0;
  double square = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double error = y[i] / std::exp2(static_cast<double>(x[i])) - 1.0;
    EXPECT_GT(error, -0.0395) << x[i];
    EXPECT_LT(error, 0.0202) << x[i];
    mean += error / static_cast<double>(x.size());
    square += error * error / static_cast<double>(x.size());
  }
  EXPECT_NEAR(mean, 0.0, 2e-3);
  EXPECT_NEAR(std::sqrt(square), 0.0177, 5e-4);
}

TEST_P(Simd, linear_exp2_of_special_values) {
  const std::vector<float> x{
      e4m3_lazy_p_range_log2, e4m3_lazy_p_range_log2 - 9.0F, -infinity, not_a_number, -1e30F, -130.0F, 1e30F};
  std::vector<float> y(x.size());
  probe().linear_exp2(x.data(), y.data(), static_cast<int>(x.size()));
  EXPECT_EQ(y[0], e4m3_lazy_p_range);
  EXPECT_EQ(y[1], e4m3_lazy_p_range / 512.0F);
  EXPECT_EQ(y[2], 0.0F);
  EXPECT_TRUE(std::isnan(y[3]));
  EXPECT_EQ(y[4], 0.0F);
  EXPECT_EQ(y[5], 0.0F);
  EXPECT_EQ(y[6], infinity);
}

TEST_P(Simd, tanh_is_accurate_relative_to_its_value) {
  std::vector<float> x{0.0F, 1e-30F, -1e-12F, 1e-6F, 40.0F, -1e20F, infinity, -infinity};
  for (float v = -15.0F; v < 15.0F; v += 0.00137F) x.push_back(v);
  std::vector<float> y(x.size());
  probe().tanh(x.data(), y.data(), static_cast<int>(x.size()));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double expected = std::tanh(static_cast<double>(x[i]));
    EXPECT_LE(std::abs(y[i] - expected), 4e-7 * std::abs(expected)) << x[i];
  }
  probe().tanh(&not_a_number, y.data(), 1);
  EXPECT_TRUE(std::isnan(y[0]));
}

template <typename T>
void expect_widens(void (*widen)(const T*, float*, int), int patterns) {
  std::vector<T> x;
  for (int i = 0; i < patterns; ++i) x.push_back({static_cast<decltype(T::bits)>(i)});
  x.push_back({1});  // an odd count, so that the partial register is used
  std::vector<float> y(x.size());
  widen(x.data(), y.data(), static_cast<int>(x.size()));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float expected = to_f32(x[i]);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(y[i])) << i;
    } else {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(y[i]), std::bit_cast<std::uint32_t>(expected)) << i;
    }
  }
}

TEST_P(Simd, widening_is_exact_for_every_code) {
  expect_widens(probe().widen_f16, 65536);
  expect_widens(probe().widen_bf16, 65536);
  expect_widens(probe().widen_e4m3, 256);
}

/// Numbers at, just below and just above every boundary between two numbers, and special values.
template <typename T>
std::vector<float> near_boundaries() {
  std::vector<float> x{0.0F,   -0.0F,   infinity, -infinity, not_a_number,
                       1e-45F, 3.4e38F, -3.4e38F, 65519.9F,  65520.0F};
  for (int i = 0; i < 65535; ++i) {
    const float a = to_f32(T{static_cast<std::uint16_t>(i)});
    const float b = to_f32(T{static_cast<std::uint16_t>(i + 1)});
    if (!std::isfinite(a) || !std::isfinite(b)) continue;
    const float middle = static_cast<float>((static_cast<double>(a) + b) / 2);
    x.insert(x.end(), {middle, std::nextafter(middle, infinity), std::nextafter(middle, -infinity), a});
  }
  return x;
}

template <typename T>
void expect_narrows(void (*narrow)(const float*, T*, int)) {
  const std::vector<float> x = near_boundaries<T>();
  std::vector<T> y(x.size());
  narrow(x.data(), y.data(), static_cast<int>(x.size()));
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) {
      EXPECT_TRUE(std::isnan(to_f32(y[i])));
    } else {
      EXPECT_EQ(y[i].bits, from_f32<T>(x[i]).bits) << x[i];
    }
  }
}

TEST_P(Simd, narrowing_rounds_to_nearest_even) {
  expect_narrows(probe().narrow_f16);
  expect_narrows(probe().narrow_bf16);
}

TEST_P(Simd, transpose_of_any_shape) {
  for (int rows = 1; rows < 20; ++rows) {
    for (int columns : {1, 3, 4, 7, 16, 33}) {
      const int src_stride = columns + 3;
      const int dst_stride = rows + 2;
      std::vector<float> src(static_cast<std::size_t>(rows * src_stride));
      for (std::size_t i = 0; i < src.size(); ++i) src[i] = static_cast<float>(i);
      std::vector<float> dst(static_cast<std::size_t>(columns * dst_stride), -1.0F);
      probe().transpose(src.data(), src_stride, rows, columns, dst.data(), dst_stride);
      for (int c = 0; c < columns; ++c) {
        for (int r = 0; r < dst_stride; ++r) {
          const float expected = r < rows ? src[static_cast<std::size_t>(r * src_stride + c)] : -1.0F;
          ASSERT_EQ(dst[static_cast<std::size_t>(c * dst_stride + r)], expected);
        }
      }
    }
  }
}

TEST_P(Simd, bf16_dot_product_multiplies_pairs) {
  if (probe().dot_bf16 == nullptr) GTEST_SKIP() << "no such instruction in " << name_of(probe().target);
  std::vector<float> a;
  std::vector<float> b;
  std::vector<float> sum;
  std::vector<float> expected;
  for (int i = 0; i < 2 * probe().lanes; ++i) {
    a.push_back(1.0F + 0.01F * static_cast<float>(i));
    b.push_back(2.0F - 0.03F * static_cast<float>(i));
  }
  const auto rounded = [](float x) { return to_f32(from_f32<bf16>(x)); };
  for (int i = 0; i < probe().lanes; ++i) {
    const auto j = static_cast<std::size_t>(2 * i);
    sum.push_back(static_cast<float>(i));
    expected.push_back(sum.back() + rounded(a[j]) * rounded(b[j]) + rounded(a[j + 1]) * rounded(b[j + 1]));
  }
  probe().dot_bf16(a.data(), b.data(), sum.data());
  for (std::size_t i = 0; i < sum.size(); ++i)
    EXPECT_NEAR(sum[i], expected[i], 1e-6F * (1 + std::abs(expected[i])));
}

/// The unit's sums, bit for bit: even and odd columns apart, each product fused with its sum, subnormal
/// numbers as 0. The expected bits are what the manual's formula gives; a Xeon gave the same.
TEST_P(Simd, a_product_of_tiles_adds_up_in_the_units_order) {
  if (probe().multiply_tiles == nullptr) GTEST_SKIP() << name_of(probe().target) << " has no matrix unit";
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  constexpr float tiny = 0x1p-130F;  // subnormal in bf16, too
  for (int round = 0; round < 50; ++round) {
    std::array<bf16, 512> a{};
    std::array<bf16, 512> b{};
    std::array<float, 256> c{};
    const auto draw = [&](int i) { return from_f32<bf16>(i % 37 == round ? tiny : normal(random)); };
    for (int i = 0; i < 512; ++i) a[i] = draw(i);
    for (int i = 0; i < 512; ++i) b[i] = draw(i);
    for (float& x : c) x = 100.0F * normal(random);
    if (round == 1) a[3] = from_f32<bf16>(infinity);
    if (round == 2) b[40] = from_f32<bf16>(not_a_number);
    std::array<float, 256> expected = c;
    const auto value = [](bf16 x) { return std::fabs(to_f32(x)) < 0x1p-126F ? 0.0F : to_f32(x); };
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 16; ++n) {
        std::array<float, 2> sums{};
        for (int k = 0; k < 16; ++k) {
          for (int half = 0; half < 2; ++half) {
            sums[half] =
                std::fma(value(a[m * 32 + 2 * k + half]), value(b[k * 32 + 2 * n + half]), sums[half]);
          }
        }
        expected[m * 16 + n] += sums[0] + sums[1];
      }
    }
    probe().multiply_tiles(a.data(), b.data(), c.data());
    for (int i = 0; i < 256; ++i) {
      if (std::isnan(expected[i])) {
        EXPECT_TRUE(std::isnan(c[i])) << "round " << round << ", element " << i;
      } else {
        EXPECT_EQ(c[i], expected[i]) << "round " << round << ", element " << i;
      }
    }
  }
}

/// Whole numbers of all values, the extremes in every place.
template <typename B, typename Multiply>
void expect_exact_sums(Multiply multiply) {
  std::mt19937 random(11);
  for (int round = 0; round < 50; ++round) {
    std::array<std::int8_t, 1024> a{};
    std::array<B, 1024> b{};
    std::array<std::int32_t, 256> c{};
    const bool extreme = round == 0;
    for (auto& x : a) x = extreme ? std::int8_t{-128} : static_cast<std::int8_t>(random());
    for (auto& x : b) x = extreme ? std::numeric_limits<B>::max() : static_cast<B>(random());
    for (auto& x : c) x = static_cast<std::int32_t>(random() % 2000000) - 1000000;
    std::array<std::int32_t, 256> expected = c;
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 16; ++n) {
        for (int k = 0; k < 64; ++k) expected[m * 16 + n] += a[m * 64 + k] * b[k / 4 * 64 + n * 4 + k % 4];
      }
    }
    multiply(a.data(), b.data(), c.data());
    EXPECT_EQ(c, expected) << "round " << round;
  }
}

TEST_P(Simd, a_product_of_tiles_of_bytes_is_exact) {
  if (probe().multiply_tiles == nullptr) GTEST_SKIP() << name_of(probe().target) << " has no matrix unit";
  expect_exact_sums<std::int8_t>(probe().multiply_tiles_s8);
  expect_exact_sums<std::uint8_t>(probe().multiply_tiles_s8_u8);
}

INSTANTIATE_TEST_SUITE_P(targets, Simd, testing::ValuesIn(built_probes()),
                         [](const auto& instance) { return name_of(instance.param->target); });

TEST(Convert, narrowing_inverts_widening_for_every_code) {
  for (int i = 0; i < 65536; ++i) {
    const f16 h{static_cast<std::uint16_t>(i)};
    const bf16 b{static_cast<std::uint16_t>(i)};
    if (!std::isnan(to_f32(h))) {
      EXPECT_EQ(from_f32<f16>(to_f32(h)).bits, h.bits);
    }
    if (!std::isnan(to_f32(b))) {
      EXPECT_EQ(from_f32<bf16>(to_f32(b)).bits, b.bits);
    }
  }
  for (int i = 0; i < 256; ++i) {
    const e4m3 q{static_cast<std::uint8_t>(i)};
    if (!std::isnan(to_f32(q))) {
      EXPECT_EQ(from_f32<e4m3>(to_f32(q)).bits, q.bits);
    }
  }
}

TEST(Convert, narrowing_goes_to_the_nearest_code) {
  for (int i = 0; i < 0x7E; ++i) {
    const float low = to_f32(e4m3{static_cast<std::uint8_t>(i)});
    const float high = to_f32(e4m3{static_cast<std::uint8_t>(i + 1)});
    const float middle = (low + high) / 2;
    EXPECT_EQ(from_f32<e4m3>(std::nextafter(middle, 0.0F)).bits, i);
    EXPECT_EQ(from_f32<e4m3>(std::nextafter(middle, infinity)).bits, i + 1);
    EXPECT_EQ(from_f32<e4m3>(middle).bits, (i % 2 == 0) ? i : i + 1);
  }
  EXPECT_EQ(from_f32<f16>(65504.0F).bits, 0x7BFF);
  EXPECT_EQ(from_f32<f16>(65519.9F).bits, 0x7BFF);
  EXPECT_EQ(from_f32<f16>(65520.0F).bits, 0x7C00);
  EXPECT_EQ(from_f32<f16>(0x1p-25F).bits, 0);  // a tie, to even
  EXPECT_EQ(from_f32<f16>(0x1.8p-25F).bits, 1);
  EXPECT_EQ(from_f32<bf16>(0x1.01p0F).bits, 0x3F80);  // a tie, to even
  EXPECT_EQ(from_f32<bf16>(0x1.03p0F).bits, 0x3F82);
}

}  // namespace
}  // namespace tandem::cpu
