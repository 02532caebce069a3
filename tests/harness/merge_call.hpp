// A call to merge as a test describes it (MergeCase), and the same with memory (MergeCall).
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "box.hpp"
#include "call.hpp"
#include "tandem/cache.hpp"

namespace tandem::harness {

struct MergeCase {
  std::uint64_t seed = 1;
  DType dtype = DType::f32;
  DType out_dtype = DType::f32;
  std::int64_t parts = 2;
  bool packed = false;
  std::int64_t batch = 1;
  std::int64_t rows = 5;
  std::int64_t heads = 2;
  std::int64_t head_dim = 64;
  double lse_center = 0.0;
  double lse_spread = 3.0;
  double empty = 0.0;  ///< of the (part, row) pairs; their out is NaN
  bool lse = true;
  int threads = 2;
  Layout layout, lse_layout, out_layout;

  [[nodiscard]] std::string describe() const;
};

class MergeCall {
 public:
  explicit MergeCall(const MergeCase& c);

  /// Valid as long as this.
  [[nodiscard]] MergeArgs args() const;
  void prepare();
  /// Success if out and lse are within 1e-6 (a rounding more where out is 16-bit) of the fp64 result, and
  /// nothing else changed.
  [[nodiscard]] testing::AssertionResult correct() const;

  /// out's index of a row, and lse's.
  [[nodiscard]] std::int64_t out_at(std::int64_t b, std::int64_t row, std::int64_t head) const;
  [[nodiscard]] std::int64_t lse_at(std::int64_t b, std::int64_t row, std::int64_t head) const;

  MergeCase spec;
  std::vector<Box> outs, lses;
  Box out, lse;

 private:
  mutable std::vector<ConstTensor> out_views_, lse_views_;
};

}  // namespace tandem::harness
