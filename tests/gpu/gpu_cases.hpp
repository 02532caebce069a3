// The problems that forward and backward are given on a GPU alike.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "harness/call.hpp"

namespace tandem::gpu {

/// Skips its tests, with the reason, where there is no GPU.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override;
};

harness::Case small_case(DType dtype, std::int64_t seqlen_q = 64, std::int64_t seqlen_k = 64);

struct Shape {
  std::int64_t head_dim_qk, head_dim_v;
  DType dtype;
  enum Mask { full, causal, window } mask;
};

/// Pairs of head_dim_qk and head_dim_v, with every mask.
std::vector<Shape> shapes_of(const std::vector<std::pair<int, int>>& head_dims,
                             const std::vector<DType>& dtypes);
/// Head dimensions at and between the tiles' own, both dtypes, every mask.
std::vector<Shape> shapes();
std::string name_of(const testing::TestParamInfo<Shape>& at);
/// Grouped heads, and more keys than queries.
harness::Case case_of(const Shape& shape, std::int64_t seqlen);

/// All features crossed, of at most 400 rows; what is no 16-bit problem becomes one.
harness::Case random_16_bit_case(int seed);

/// Problems in which batch, queries, keys or several of them are 0.
std::vector<harness::Case> empty_cases();

}  // namespace tandem::gpu
