// The online softmax of a warpgroup, block by block, against fp64.
#include "tile/softmax.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <vector>

#include "launch.hpp"

namespace tandem::tile {
namespace {

constexpr int rows = 64;
constexpr int columns = 32;
constexpr int blocks = 4;
constexpr float infinity = std::numeric_limits<float>::infinity();

/// Scores of all blocks: [block][row][column].
using Scores = std::vector<float>;

Scores random_scores(float step) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  Scores scores(static_cast<std::size_t>(blocks * rows * columns));
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const auto block = static_cast<float>(i / (rows * columns));
    scores[i] = 2.0F * normal(random) + step * block;
  }
  // Row 5 sees no key, row 40 none of the first block: another warp, so that lazy references can move there.
  for (int j = 0; j < blocks * columns; ++j) {
    scores[static_cast<std::size_t>((j / columns * rows + 5) * columns + j % columns)] = -infinity;
  }
  for (int j = 0; j < columns; ++j) scores[static_cast<std::size_t>(40 * columns + j)] = -infinity;
  scores[7 * columns + 3] = std::nanf("");
  return scores;
}

struct Result {
  std::vector<float> lse = std::vector<float>(rows);
  std::vector<float> out = std::vector<float>(rows);  ///< the output of a V of ones: 1, or 0
};

/// `lazy`: references stay while exponentials are small enough to be kept.
Result run(const Scores& scores, float scale, bool lazy, const float* sink = nullptr) {
  Result result;
  const float scale_log2 = scale * log2_e;
  emulator::launch(
      [&] {
        const int thread = static_cast<int>(ptx::thread_index());
        const FragmentPosition position(thread);
        OnlineSoftmax softmax;
        float out[2] = {0.0F, 0.0F};
        for (int block = 0; block < blocks; ++block) {
          float s[columns / 2];
          const auto load = [&] {
            for (int i = 0; i < columns / 2; ++i) {
              s[i] = scores[static_cast<std::size_t>((block * rows + position.row(i / 2 % 2)) * columns +
                                                     position.col(i / 4) + i % 2)];
            }
          };
          load();
          float total[2];
          float rescale[2] = {1.0F, 1.0F};
          bool done = false;
          if (lazy && block > 0) {
            softmax.exponentials(s, total, scale_log2, [](int) {});
            const bool outgrown = ptx::ballot(softmax.outgrown(total)) != 0;
            if (!outgrown) softmax.add(total);
            done = !outgrown || softmax.move(s, total, rescale);
            if (!done) load();
          }
          if (!done) {
            softmax.update(s, rescale, scale_log2);
            softmax.exponentials(s, total, scale_log2, [](int) {});
            softmax.add(total, rescale);
          }
          for (int h = 0; h < 2; ++h) out[h] = out[h] * rescale[h] + sum_of_quad(total[h]);
        }
        for (int h = 0; h < 2; ++h) {
          float factor = 0.0F;
          const float lse =
              sum_of_row(softmax, h).finish(sink != nullptr, sink != nullptr ? *sink * log2_e : 0.0F, factor);
          if (thread % 4 == 0) {
            result.lse[static_cast<std::size_t>(position.row(h))] = lse;
            result.out[static_cast<std::size_t>(position.row(h))] = out[h] * factor;
          }
        }
      },
      {.threads = warpgroup_size}, {});
  return result;
}

double exact_lse(const Scores& scores, int row, float scale) {
  long double sum = 0.0;
  for (int j = 0; j < blocks * columns; ++j) {
    sum +=
        std::exp(static_cast<long double>(scale) *
                 static_cast<long double>(
                     scores[static_cast<std::size_t>((j / columns * rows + row) * columns + j % columns)]));
  }
  return static_cast<double>(std::log(sum));
}

/// Blocks that fall, rise a little and rise much: lazily, the last moves references in every block.
TEST(TileSoftmax, BlocksAddUpToTheSoftmaxOfTheRow) {
  for (const float step : {-3.0F, 1.0F, 40.0F, 400.0F}) {
    for (const bool lazy : {false, true}) {
      SCOPED_TRACE(testing::Message() << "step " << step << (lazy ? ", lazy" : ""));
      const Scores scores = random_scores(step);
      const Result result = run(scores, 0.5F, lazy);
      for (int row = 0; row < rows; ++row) {
        const auto r = static_cast<std::size_t>(row);
        if (row == 5) {  // sees no key
          EXPECT_EQ(result.lse[r], -infinity);
          EXPECT_EQ(result.out[r], 0.0F);
        } else if (row == 7) {
          EXPECT_TRUE(std::isnan(result.lse[r]) && std::isnan(result.out[r]));
        } else {
          const double expected = exact_lse(scores, row, 0.5F);
          EXPECT_NEAR(result.lse[r], expected, 2e-6 * std::max(1.0, std::abs(expected))) << "row " << row;
          EXPECT_NEAR(result.out[r], 1.0, 2e-6) << "row " << row;
        }
      }
    }
  }
}

TEST(TileSoftmax, ASinkJoinsTheSumOfRowsThatSeeAKey) {
  const Scores scores = random_scores(1.0F);
  for (const float sink : {-30.0F, 1.5F, 60.0F}) {
    const Result result = run(scores, 0.5F, false, &sink);
    for (const int row : {0, 40, 63}) {
      const double without = exact_lse(scores, row, 0.5F);
      const double high = std::max(without, static_cast<double>(sink));
      const double expected = high + std::log(std::exp(without - high) + std::exp(sink - high));
      const auto r = static_cast<std::size_t>(row);
      EXPECT_NEAR(result.lse[r], expected, 4e-6 * std::max(1.0, std::abs(expected))) << "row " << row;
      EXPECT_NEAR(result.out[r], std::exp(without - expected), 1e-5) << "row " << row;
    }
  }
}

/// Both rows of a thread begin without a key, whatever the registers held.
TEST(TileSoftmax, BeginsUnseen) {
  alignas(OnlineSoftmax) std::byte memory[sizeof(OnlineSoftmax)];
  std::memset(memory, 0x40, sizeof memory);
  const auto* softmax = new (memory) OnlineSoftmax;
  for (int h = 0; h < 2; ++h) {
    EXPECT_EQ(softmax->reference[h], -infinity);
    EXPECT_EQ(softmax->sum[h], 0.0F);
  }
}

}  // namespace
}  // namespace tandem::tile
