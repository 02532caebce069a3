#include "gpu_cases.hpp"
#include "harness/changes.hpp"

#include <fmt/format.h>

#include <array>

#include "gpu_runner.hpp"

namespace tandem::gpu {

using harness::Case;

void GpuTest::SetUp() {
  if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
}

Case small_case(DType dtype, std::int64_t seqlen_q, std::int64_t seqlen_k) {
  return harness::with({}, {.dtype = dtype, .seqlen_q = seqlen_q, .seqlen_k = seqlen_k});
}

std::vector<Shape> shapes_of(const std::vector<std::pair<int, int>>& head_dims,
                             const std::vector<DType>& dtypes) {
  std::vector<Shape> all;
  for (const auto& [qk, v] : head_dims) {
    for (const DType dtype : dtypes) {
      for (const Shape::Mask mask : {Shape::full, Shape::causal, Shape::window}) {
        all.push_back({qk, v, dtype, mask});
      }
    }
  }
  return all;
}

std::vector<Shape> shapes() {
  return shapes_of(
      {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}, {8, 8}, {40, 72}, {160, 32}},
      {DType::f16, DType::bf16});
}

std::string name_of(const testing::TestParamInfo<Shape>& at) {
  constexpr const char* masks[] = {"full", "causal", "window"};
  return fmt::format("d{}_{}_{}_{}", at.param.head_dim_qk, at.param.head_dim_v, name_of(at.param.dtype),
                     masks[at.param.mask]);
}

Case case_of(const Shape& shape, std::int64_t seqlen) {
  Case c = with(small_case(shape.dtype, seqlen, seqlen + 64), {.batch = 2, .heads_q = 4, .heads_kv = 2});
  change(c, {.head_dim_qk = shape.head_dim_qk, .head_dim_v = shape.head_dim_v});
  c.options.causal = shape.mask == Shape::causal;
  if (shape.mask == Shape::window) {
    change(c, {.window_left = 100, .window_right = 30});
  }
  return c;
}

Case random_16_bit_case(int seed) {
  Case c = harness::random_case(static_cast<std::uint64_t>(seed), 400);
  if (c.dtype == DType::f32 || c.dtype == DType::e4m3) {
    c.dtype = seed % 2 != 0 ? DType::f16 : DType::bf16;
    c.scales = 0;
  }
  return c;
}

std::vector<Case> empty_cases() {
  std::vector<Case> all;
  for (const auto& [batch, q, k] :
       std::vector<std::array<std::int64_t, 3>>{{0, 5, 5}, {2, 0, 5}, {2, 5, 0}, {2, 0, 0}}) {
    Case& c = all.emplace_back(small_case(DType::bf16, q, k));
    change(c, {.batch = batch, .heads_q = 2});
  }
  return all;
}

}  // namespace tandem::gpu
