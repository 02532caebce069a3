// What scores go through before the mask, against the formula in fp64.
#include "tile/logits.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "launch.hpp"

namespace tandem::tile {
namespace {

constexpr float some_scores[8] = {-300.0F, -20.0F, -1.0F, -1e-3F, 0.0F, 0.5F, 17.0F, 400.0F};

double capped(double score, double cap) {
  return cap * std::tanh(score / cap);
}

TEST(TileLogits, AreScaledOrCapped) {
  float scaled[8];
  float softcap[8];
  float raw[8];
  for (int i = 0; i < 8; ++i) scaled[i] = softcap[i] = raw[i] = some_scores[i];
  transform_scores<ScoreTransform::raw>(raw, {.scale = -0.125F, .softcap = 20.0F});
  transform_scores<ScoreTransform::scaled>(scaled, {.scale = -0.125F, .softcap = 20.0F});
  transform_scores<ScoreTransform::softcap>(softcap, {.scale = -0.125F, .softcap = 20.0F});
  for (int i = 0; i < 8; ++i) {
    const double score = static_cast<double>(some_scores[i]);
    EXPECT_EQ(raw[i], some_scores[i]);
    EXPECT_EQ(scaled[i], -0.125F * some_scores[i]);
    EXPECT_NEAR(softcap[i], capped(-0.125 * score, 20.0), 20.0 * 3e-7) << score;
  }
}

TEST(TileLogits, CapsOfQuantizedScoresAreInUnitsOfTheLogarithmToBaseTwo) {
  const double cap = 15.0;
  const double log2 = static_cast<double>(log2_e);
  for (const double shift : {0.0, -2.5}) {
    float s[8];
    const float unit[2] = {0.25F,
                           0.5F};  // of the rows h = 0, 1: score * unit + shift is the exponent of tanh
    const float shifts[2] = {static_cast<float>(shift), static_cast<float>(-shift)};
    for (int i = 0; i < 8; ++i) s[i] = some_scores[i];
    cap_scores(s, unit, shifts, static_cast<float>(cap * log2));
    for (int i = 0; i < 8; ++i) {
      const int h = i / 2 % 2;
      const double exponent = static_cast<double>(some_scores[i] * unit[h] + shifts[h]);
      const double expected = cap * log2 * std::tanh(exponent / log2 / 2.0);
      EXPECT_NEAR(s[i], expected, cap * log2 * 3e-7) << some_scores[i];
    }
  }
}

TEST(TileLogits, TheBackwardHasTheCapsSlope) {
  const double cap = 30.0;
  const double scale = 0.2;
  const auto inner = static_cast<float>(2.0 * scale * static_cast<double>(log2_e) / cap);
  for (const float score : some_scores) {
    const double t = std::tanh(scale * static_cast<double>(score) / cap);
    const CappedScore got = cap_score(score, inner);
    EXPECT_NEAR(got.fraction, t, 3e-7) << score;
    EXPECT_NEAR(got.slope, 1.0 - t * t, 3e-7) << score;
  }
}

/// The block whose exponentials overflowed reads its scores again: rows of q past the end are the last one's.
TEST(TileLogits, ScoresComeFromGlobalMemoryAsFromTheProduct) {
  constexpr int heads = 2;
  constexpr int head_dim = 8;
  constexpr int seqlen_q = 70;
  constexpr int seqlen_k = 48;
  const auto value = [](int i) { return static_cast<float>(i % 7 - 3); };  // products are exact
  std::vector<u16> q(seqlen_q * heads * head_dim);
  std::vector<u16> k(seqlen_k * head_dim);
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = static_cast<u16>(ptx::pack_bf16(value(static_cast<int>(i)), 0.0F));
  }
  for (std::size_t i = 0; i < k.size(); ++i) {
    k[i] = static_cast<u16>(ptx::pack_bf16(value(static_cast<int>(i * 5)), 0.0F));
  }
  ForwardParams p{};
  p.q_data = q.data();
  p.k_data = k.data();
  p.q_stride = {0, heads * head_dim, head_dim};
  p.k_stride = {0, head_dim, 0};
  p.heads_q = heads;
  p.heads_kv = 1;
  p.head_dim_qk = head_dim;
  TileIndex t;
  t.head = 1;
  t.seqlen_q = seqlen_q;
  t.seqlen_k = seqlen_k;
  emulator::Options options{.buffers = {emulator::readable(q), emulator::readable(k)}};
  emulator::launch(
      [&] {
        const FragmentPosition position(static_cast<int>(ptx::thread_index()));
        float s[16] = {};  // 32 keys from 16 on
        load_scores<Tiling{}>(s, p, t, 64, 16, position);
        for (int i = 0; i < 16; ++i) {
          const int row = std::min(64 + position.row(i / 2 % 2), seqlen_q - 1);
          const int key = 16 + position.col(i / 4) + i % 2;
          float expected = 0.0F;
          for (int d = 0; d < head_dim; ++d) {
            expected += value((row * heads + 1) * head_dim + d) * value((key * head_dim + d) * 5);
          }
          EXPECT_EQ(s[i], expected) << "query " << row << ", key " << key;
        }
      },
      {.threads = warpgroup_size}, options);
}

}  // namespace
}  // namespace tandem::tile
