// What a row is worth that has seen no key, among parts and behind the forward pass.
#include "kernels/tile/part_merge.cuh"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "kernels/common/preprocess.cuh"
#include "launch.hpp"

namespace tandem {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

/// What finish() gives a row that has taken parts with these LSEs: its LSE, and the factor of O.
std::vector<float> finished(const std::vector<float>& lses) {
  std::vector<float> found(2);
  emulator::launch(
      [&] {
        tile::PartMerge row;
        for (const float lse : lses) row.take(lse);
        float factor = -1.0F;
        const float lse = row.finish(false, 0.0F, factor);
        if (ptx::thread_index() != 0) return;
        found = {lse, factor};
      },
      {.blocks = 1, .threads = 32}, {});
  return found;
}

TEST(PartMerge, ARowThatHasSeenNoKeyIsMinusInfinityAndZero) {
  EXPECT_EQ(finished({}), (std::vector<float>{-infinity, 0.0F}));
  EXPECT_EQ(finished({-infinity, -infinity}), (std::vector<float>{-infinity, 0.0F}));
  EXPECT_EQ(finished({-infinity, 3.0F}), (std::vector<float>{3.0F, 1.0F}));
}

/// Whether an LSE is a sink's alone.
bool is_sinks_own_lse(float sink, float lse) {
  const std::vector<float> sinks{sink};
  bool found = false;
  emulator::Options options;
  options.buffers = {emulator::readable(sinks)};
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
