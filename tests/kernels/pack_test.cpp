// The kernel that packs tensors for TMA, in the emulator: every element, zeros behind them, no
// access outside.
#include "kernels/common/pack.cuh"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "launch.hpp"

namespace tandem {
namespace {

struct Layout {
  int batch, rows, heads, head_dim;
  Strides stride;
  int offset;  ///< elements before the first
  bool paired;
};

void check(const Layout& l) {
  const long long last =
      (l.batch - 1) * l.stride.batch + (l.rows - 1) * l.stride.row + (l.heads - 1) * l.stride.head;
  std::vector<u16> source(static_cast<std::size_t>(l.offset + last + l.head_dim));
  std::iota(source.begin(), source.end(), u16{1});
  const int pitch = (l.head_dim + 7) / 8 * 8;
  std::vector<u16> target(static_cast<std::size_t>(l.batch * l.rows * l.heads * pitch), u16{0xdead});
  const PackParams params{.source = source.data() + l.offset,
                          .stride = l.stride,
                          .target = target.data(),
                          .batch = l.batch,
                          .rows = l.rows,
                          .heads = l.heads,
                          .head_dim = l.head_dim,
                          .pitch = pitch};
  const emulator::Grid grid{.blocks = 2, .threads = pack_threads};
  emulator::Options options;
  options.buffers = {emulator::readable(source), emulator::writable(target)};
  if (l.paired) {
    emulator::launch(&pack<PackConfig{.paired = true}>, params, grid, options);
  } else {
    emulator::launch(&pack<PackConfig{.paired = false}>, params, grid, options);
  }
  std::size_t i = 0;
  for (int b = 0; b < l.batch; ++b) {
    for (int r = 0; r < l.rows; ++r) {
      for (int h = 0; h < l.heads; ++h) {
        for (int c = 0; c < pitch; ++c) {
          const long long at = l.offset + b * l.stride.batch + r * l.stride.row + h * l.stride.head + c;
          const u16 expected = c < l.head_dim ? source[static_cast<std::size_t>(at)] : u16{0};
          ASSERT_EQ(target[i++], expected)
              << "batch " << b << " row " << r << " head " << h << " column " << c;
        }
      }
    }
  }
}

TEST(Pack, TakesAnyStridesElementByElement) {
  check({.batch = 2,
         .rows = 5,
         .heads = 3,
         .head_dim = 20,
         .stride = {.batch = 400, .row = 67, .head = 21},
         .offset = 1,
         .paired = false});
}

TEST(Pack, TakesOddHeadDimensions) {
  check({.batch = 1,
         .rows = 40,
         .heads = 2,
         .head_dim = 65,
         .stride = {.batch = 0, .row = 130, .head = 65},
         .offset = 0,
         .paired = false});
}

TEST(Pack, TakesPairsWhereTheyAreAligned) {
  check({.batch = 2,
         .rows = 7,
         .heads = 2,
         .head_dim = 36,
         .stride = {.batch = 1000, .row = 82, .head = 38},
         .offset = 2,
         .paired = true});
}

TEST(Pack, RepeatsWhatStrideZeroRepeats) {
  check({.batch = 3,
         .rows = 4,
         .heads = 2,
         .head_dim = 8,
         .stride = {.batch = 0, .row = 8, .head = 0},
         .offset = 3,
         .paired = false});
}

TEST(Pack, WorksOnMoreThanOneRoundOfTheGrid) {
  check({.batch = 1,
         .rows = 600,
         .heads = 1,
         .head_dim = 16,
         .stride = {.batch = 0, .row = 17, .head = 0},
         .offset = 0,
         .paired = false});
}

}  // namespace
}  // namespace tandem
