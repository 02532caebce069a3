// What a row is worth that has seen no key, among parts and behind the forward pass.
#include "tile/part_merge.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "launch.hpp"
#include "ops/backward/common/preprocess.cuh"

namespace tandem {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

/// What finish() gives a row that has taken these parts: its LSE, and the factor of O.
std::vector<float> finished(const std::vector<PartSum>& parts) {
  std::vector<float> found(2);
  emulator::launch(
      [&] {
        tile::PartMerge row;
        for (const PartSum& part : parts) row.take(part);
        float factor = -1.0F;
        const float lse = row.finish(false, 0.0F, factor);
        if (ptx::thread_index() != 0) return;
        found = {lse, factor};
      },
      {.blocks = 1, .threads = 32}, {});
  return found;
}

TEST(PartMerge, ARowThatHasSeenNoKeyIsMinusInfinityAndZero) {
  constexpr PartSum none{-infinity, 0.0F};
  EXPECT_EQ(finished({}), (std::vector<float>{-infinity, 0.0F}));
  EXPECT_EQ(finished({none, none}), (std::vector<float>{-infinity, 0.0F}));
  EXPECT_EQ(finished({none, {3.0F, 1.0F}, none}), (std::vector<float>{3.0F * tile::ln_2, 1.0F}));
}

TEST(PartMerge, ARowThatHasSeenNothingButMinusInfinityIsNaN) {
  constexpr PartSum none{-infinity, 0.0F};
  constexpr PartSum infinite{-infinity, -4.0F};
  for (const auto& parts : {std::vector{infinite, none}, std::vector{none, infinite, infinite}})
    EXPECT_TRUE(std::isnan(finished(parts)[0]) && std::isnan(finished(parts)[1]));
  EXPECT_EQ(finished({infinite, {3.0F, 1.0F}, infinite}), (std::vector<float>{3.0F * tile::ln_2, 1.0F}));
}

/// The sums are exact however far the references are: an LSE of 1e9 would have no room for them.
TEST(PartMerge, PartsCountByTheirSumsBesideFarReferences) {
  EXPECT_EQ(finished({{1e9F, 1.0F}, {1e9F, 3.0F}})[1], 0.25F);
}

/// Whether an LSE is a sink's alone.
bool is_sinks_own_lse(float sink, float lse) {
  const std::vector<float> sinks{sink};
  bool found = false;
  emulator::Options options{.buffers = {emulator::readable(sinks)}};
  BackwardParams p{};
  p.sink = sinks.data();
  p.sink_stride = 1;
  emulator::launch(
      [&] {
        const bool own = is_sinks_own(p, 0, lse);
        if (ptx::thread_index() == 0) found = own;
      },
      {.blocks = 1, .threads = 32}, options);
  return found;
}

/// Keys with a millionth of the sum, or more, have been seen.
TEST(SinksOwn, IsAnLseWithinAMillionthOfTheSink) {
  EXPECT_TRUE(is_sinks_own_lse(0.0F, 0.0F));
  EXPECT_TRUE(is_sinks_own_lse(0.0F, 0.9e-6F));
  EXPECT_TRUE(is_sinks_own_lse(0.0F, -0.9e-6F));
  EXPECT_FALSE(is_sinks_own_lse(0.0F, 1.2e-6F));
  EXPECT_TRUE(is_sinks_own_lse(-100.0F, -100.00008F));
  EXPECT_FALSE(is_sinks_own_lse(-100.0F, -99.999F));
}

}  // namespace
}  // namespace tandem
