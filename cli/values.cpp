#include "values.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "cpu/common/convert.hpp"

namespace tandem::cli {
namespace {

constexpr float largest_e4m3 = 448.0F;

std::uint64_t next(std::uint64_t& state) {
  // splitmix64 (Steele, Lea, Flood 2014): one multiply-xorshift chain a number, good enough for test data.
  std::uint64_t z = state += 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31U);
}

}  // namespace

files::TensorData converted(const files::TensorData& tensor, DType dtype, float factor) {
  files::TensorData result(dtype, tensor.shape());
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    const float value = load_as_f32(tensor.bytes().data(), tensor.dtype(), i);
    store_from_f32(result.bytes().data(), dtype, i, value * factor);
  }
  return result;
}

Quantized quantized_e4m3(const files::TensorData& tensor) {
  float largest = 0.0F;
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    const float magnitude = std::abs(load_as_f32(tensor.bytes().data(), tensor.dtype(), i));
    if (std::isfinite(magnitude)) largest = std::max(largest, magnitude);
  }
  const float scale = largest > 0.0F ? largest / largest_e4m3 : 1.0F;
  files::TensorData stored(DType::f32, {1});
  store_from_f32(stored.bytes().data(), DType::f32, 0, scale);
  return {converted(tensor, DType::e4m3, 1.0F / scale), std::move(stored)};
}

void fill_normal(files::TensorData& tensor, std::uint64_t seed) {
  std::uint64_t state = seed;
  const std::int64_t count = tensor.numel();
  for (std::int64_t i = 0; i < count; i += 2) {
    // Box-Muller: two uniforms, the first in (0, 1], give two normals.
    constexpr double unit = 0x1p-53;
    const double radius = std::sqrt(-2.0 * std::log((static_cast<double>(next(state) >> 11U) + 1.0) * unit));
    const double angle = 2.0 * std::numbers::pi * (static_cast<double>(next(state) >> 11U) * unit);
    store_from_f32(tensor.bytes().data(), tensor.dtype(), i, static_cast<float>(radius * std::cos(angle)));
    if (i + 1 < count) {
      store_from_f32(tensor.bytes().data(), tensor.dtype(), i + 1,
                     static_cast<float>(radius * std::sin(angle)));
    }
  }
}

}  // namespace tandem::cli
