// What a zero point of V adds to O, and when it is subtracted.
#include "tile/tile_softmax.cuh"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "launch.hpp"

namespace tandem::tile {
namespace {

constexpr EightBitConfig config{
    .tiling = {.head_dim_qk = 256, .head_dim_v = 256}, .qk = OperandType::s8, .pv = OperandType::s8};
static_assert(TileSoftmax<config>::zero_point);

constexpr int outputs = 8;
constexpr int words = 2;

/// O of a warpgroup's first thread before and after a tile in which all P are 1, and the excess that is left.
struct After {
  float out = 0.0F;
  float excess = 0.0F;
};

After add_a_tile(bool due) {
  std::vector<float> found(2);
  emulator::launch(
      [&] {
        TileSoftmax<config> softmax;
        softmax.reset();
        softmax.maximum[0] = softmax.maximum[1] = 0.0F;
        softmax.tile_sum[0] = softmax.tile_sum[1] = 4.0F;
        const u32 ones[words] = {0xFFFFFFFFU, 0xFFFFFFFFU};  // four P of a row, each 255 of 255
        float o[outputs] = {};
        softmax.start(1.0F, ones, o);
        softmax.add_tile(1.0F, ones, due, o);
        if (ptx::thread_index() != 0) return;
        found[0] = o[0];
        found[1] = softmax.excess[0];
      },
      {.blocks = 1, .threads = 128}, {});
  return {found[0], found[1]};
}

TEST(TileSoftmax, TheZeroPointsExcessIsSubtractedWhenItIsDue) {
  const After kept = add_a_tile(false);
  EXPECT_EQ(kept.out, 0.0F);  // no products have been added here
  const After due = add_a_tile(true);
  // The first tile's excess of all four threads of a row has gone to O, the second's is kept.
  EXPECT_FLOAT_EQ(due.excess, kept.excess / 2.0F);
  EXPECT_FLOAT_EQ(due.out, -4.0F * due.excess);
  EXPECT_GT(due.excess, 0.0F);
}

TEST(TileSoftmax, AMaximumPastTheHeadroomChangesTheUnitsOfBothRows) {
  constexpr EightBitConfig without_zero_point{
      .tiling = {.head_dim_qk = 128, .head_dim_v = 128}, .qk = OperandType::s8, .pv = OperandType::s8};
  static_assert(!TileSoftmax<without_zero_point>::zero_point);
  std::vector<float> found(4);
  emulator::launch(
      [&] {
        TileSoftmax<without_zero_point> softmax;
        softmax.reset();
        softmax.maximum[0] = softmax.maximum[1] = 0.0F;
        softmax.tile_sum[0] = softmax.tile_sum[1] = 1.0F;
        const u32 ones[words] = {0xFFFFFFFFU, 0xFFFFFFFFU};
        float o[outputs];
        for (float& x : o) x = 1.0F;
        softmax.start(1.0F, ones, o);
        softmax.maximum[0] = softmax.headroom + 10.0F;
        softmax.maximum[1] = softmax.headroom + 20.0F;
        softmax.add_tile(1.0F, ones, false, o);
        if (ptx::thread_index() == 0) std::copy_n(o, 4, found.begin());
      },
      {.blocks = 1, .threads = 128}, {});
  EXPECT_THAT(found, testing::ElementsAre(0x1p-50F, 0x1p-50F, 0x1p-60F, 0x1p-60F));
}

}  // namespace
}  // namespace tandem::tile
