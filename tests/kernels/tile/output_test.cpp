// The epilogue: rows in use, rows past a sequence's end, and memory behind both.
#include "tile/output.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "launch.hpp"

namespace tandem::tile {
namespace {

constexpr Tiling tiling{.element = Element::bf16, .head_dim_v = 64, .block_m = 128, .block_n = 64};
constexpr int heads = 2;
constexpr int pitch = 64;  // of a head's row of out
constexpr int batch_rows = 150;
constexpr u16 poison = 0x7fff;

float value(int query, int column) {
  return static_cast<float>(query % 8 + column % 4);
}

struct Outputs {
  std::vector<u16> out = std::vector<u16>(batch_rows * heads * pitch, poison);
  std::vector<float> lse = std::vector<float>(batch_rows * heads, std::nanf(""));
};

/// Warpgroup 1 of tile 0 writes its 64 rows of head 1: queries 64 to 128 of a sequence that begins in row 10
/// of a packed tensor, of which 90 are in use and 110 are there.
Outputs store(bool empty, bool vectors, const float* sink = nullptr, int warpgroup = 1) {
  Outputs outputs;
  std::vector<float> sinks(heads, sink != nullptr ? *sink : 0.0F);
  ForwardParams p{};
  p.out = outputs.out.data();
  p.lse = outputs.lse.data();
  p.sink = sink != nullptr ? sinks.data() : nullptr;
  p.sink_stride = 1;
  p.out_stride = {0, heads * pitch, pitch};
  p.lse_stride = {0, 1, batch_rows};
  p.head_dim_v = vectors ? 56 : 51;  // the true one, padded in registers
  p.packed_q = true;
  p.out_vectors = vectors;
  TileIndex t;
  t.head = 1;
  t.begin_q = 10;
  t.seqlen_q = 90;
  t.end_q = 110;
  emulator::Options options{.buffers = {emulator::writable(outputs.out), emulator::writable(outputs.lse),
                                        emulator::readable(sinks)}};
  emulator::launch(
      [&] {
        const int thread = static_cast<int>(ptx::thread_index());
        Output<tiling> output{{}, p, warpgroup, thread};
        if (empty) return output.store_empty(t);
        const FragmentPosition position(thread);
        float o[tiling.head_dim_v / 2];
        OnlineSoftmax softmax;
        for (int i = 0; i < tiling.head_dim_v / 2; ++i) {
          const int query = 64 + position.row(i / 2 % 2);
          // Not in use: whatever was computed there.
          o[i] = query < t.seqlen_q ? 4.0F * value(query, position.col(i / 4) + i % 2) : std::nanf("");
        }
        for (int h = 0; h < 2; ++h) {
          softmax.reference[h] = 3.0F;
          softmax.sum[h] = 1.0F;  // of each of four lanes
        }
        output.store(t, o, softmax);
      },
      {.threads = warpgroup_size}, options);
  return outputs;
}

void expect_rows(const Outputs& outputs, int columns, bool empty, double lse_in_use) {
  for (int row = 0; row < batch_rows; ++row) {
    const int query = row - 10;
    const bool written = query >= 64 && query < 110;
    const bool in_use = written && query < 90;
    for (int head = 0; head < heads; ++head) {
      const float lse = outputs.lse[static_cast<std::size_t>(head * batch_rows + row)];
      if (!written || head == 0) {
        EXPECT_TRUE(std::isnan(lse)) << row;
      } else if (in_use && std::isfinite(lse_in_use)) {
        EXPECT_NEAR(lse, lse_in_use, 1e-6) << row;
      } else {
        EXPECT_EQ(lse, -INFINITY) << row;
      }
      for (int c = 0; c < pitch; ++c) {
        const u16 got = outputs.out[static_cast<std::size_t>((row * heads + head) * pitch + c)];
        u16 expected = poison;
        if (written && head == 1 && c < columns) {
          expected = empty || !in_use ? u16{0} : static_cast<u16>(ptx::pack_bf16(value(query, c), 0.0F));
        }
        ASSERT_EQ(got, expected) << "row " << row << ", head " << head << ", column " << c;
      }
    }
  }
}

TEST(TileOutput, WritesRowsInUseZeroesTheRestOfTheSequenceAndNothingElse) {
  expect_rows(store(false, false), 51, false, std::log(4.0 * std::exp2(3.0)));
}

TEST(TileOutput, WritesWholeVectorsWhereTheyAreAligned) {
  expect_rows(store(false, true), 56, false, std::log(4.0 * std::exp2(3.0)));
}

TEST(TileOutput, ATileThatSeesNoKeyIsZeroWithAnLseOfMinusInfinityOrTheSink) {
  expect_rows(store(true, false), 51, true, -INFINITY);
  const float sink = 1.25F;
  expect_rows(store(true, false, &sink), 51, true, 1.25);
}

/// The rows behind them are another warpgroup's or tile's, which may see keys.
TEST(TileOutput, AWarpgroupThatSeesNoKeyWritesNoMoreThanItsRows) {
  const Outputs outputs = store(true, false, nullptr, 0);
  for (int row = 0; row < batch_rows; ++row) {
    const bool written = row >= 10 && row < 10 + 64;
    const auto at = static_cast<std::size_t>(row * heads + 1);
    EXPECT_EQ(outputs.out[at * pitch], written ? u16{0} : poison) << row;
    EXPECT_EQ(std::isnan(outputs.lse[static_cast<std::size_t>(batch_rows + row)]), !written) << row;
  }
}

}  // namespace
}  // namespace tandem::tile
