// Products and softmax side by side on a processor with a matrix unit.
//
// A block is taken 32 keys at a time, whose scores stay in the first-level cache. Between the registers of
// rows whose exponentials are computed stand products that need none of them: scores of the next 32 keys, and
// O^T += V^T P^T of the stripe before. The unit works on those while the vector unit is busy, since the
// processor looks some 500 operations ahead, about as many as the exponentials of 32 keys of a register take.
#pragma once

#if defined(TANDEM_MATRIX_UNIT)

#include "cpu/forward/softmax.hpp"
#include "cpu/forward/tile_products.hpp"

namespace tandem::cpu::TANDEM_TARGET {

constexpr int stream_keys = 32;

/// What O^T of a stripe still lacks of a block: products of 32 columns of V and 32 rows at a time.
struct WaitingProducts {
  const std::uint32_t* v = nullptr;
  std::int64_t v_step = 0;  ///< words from 32 keys to the next
  const std::uint32_t* p = nullptr;
  float* out = nullptr;
  int steps = 0;  ///< of 32 keys
  int vecs = 0;
  int next = 0;
  int count = 0;

  void advance() {
    const int pairs = (vecs + 1) / 2;
    const int column = next / pairs * 32;
    const int lane = next % pairs * 32;
    ++next;
    float* const to = out + column * stripe_lanes + lane;
    if (vecs * vec_lanes - lane >= 32) {
      accumulate_tiles<2>(v + column * 16, v_step, p + lane, steps, to);
    } else {
      accumulate_tiles<1>(v + column * 16, v_step, p + lane, steps, to);
    }
  }
  void finish() {
    while (next < count) advance();
  }
};

class TileStream {
 public:
  /// `memory`: ForwardScratch::scores.
  TileStream(const ForwardTile& tile, const Logits& logits, float* memory)
      : t_(tile), logits_(logits), steps_(in_tiles(tile.head_dim_qk) / 32) {
    for (int i = 0; i < 2; ++i) {
      scores_[i] = memory + i * stream_keys * stripe_lanes;
      p_[i] = memory + 2 * stream_keys * stripe_lanes + i * in_tiles(t_.block_k) / 2 * stripe_lanes;
    }
  }

  /// One block of keys against one stripe. O has all of it once finish() is called, before which the block
  /// and its V stay as they are.
  void attend(const Block<TileMath>& b, const Stripe<TileMath>& s, Ahead& ahead) {
    const int begin =
        b.begin < s.begin ? clamp_to(s.begin - b.begin, b.count) / stream_keys * stream_keys : 0;
    const int end = clamp_to(s.end - b.begin, b.count);
    if (begin >= end) return;
    float* const p = p_[turn_ ^= 1];
    int done = begin;  // keys before it are in O
    for (int lane = 0; lane < s.vecs * vec_lanes; lane += 32) score(b, s, begin, lane);
    const int slots = (end - begin + stream_keys - 1) / stream_keys * ((s.vecs + 1) / 2);
    const int at_once = (waiting_.count + slots - 1) / slots;
    for (int key = begin; key < end; key += stream_keys) {
      Block<TileMath> part{};
      part.begin = b.begin + key;
      part.count = b.count - key < stream_keys ? b.count - key : stream_keys;
      float* const p_of_part = p + key / 2 * stripe_lanes;
      ahead.fetch(stream_keys);
      for (int v = 0; v < s.vecs; ++v) {
        if (v % 2 == 0 && key + stream_keys < end) score(b, s, key + stream_keys, v * vec_lanes);
        if (v % 2 == 1 || v + 1 == s.vecs) {
          for (int i = 0; i < at_once && waiting_.next < waiting_.count; ++i) waiting_.advance();
        }
        soften(s, v, keys_of(part, s, v), logits_, t_.head_dim_v, scores_of(key), p_of_part, nullptr, [&] {
          finish();
          wait_for(b, s, p, done, key);
          finish();
          done = key;
        });
      }
      const int pairs = (part.count + 1) / 2;
      __builtin_memset(p_of_part + pairs * stripe_lanes, 0,
                       static_cast<std::size_t>(16 - pairs) * stripe_lanes * sizeof(float));
    }
    finish();
    wait_for(b, s, p, done, end);
  }

  void finish() { waiting_.finish(); }

 private:
  [[nodiscard]] float* scores_of(int key) const { return scores_[key / stream_keys % 2]; }

  /// Scores of 32 keys from `key` on and as many rows from `lane` on.
  void score(const Block<TileMath>& b, const Stripe<TileMath>& s, int key, int lane) {
    const std::uint32_t* const k = b.k + key * b.k_stride;
    if (s.vecs * vec_lanes - lane >= 32) {
      score_tiles<2>(k, steps_, s.q + lane, scores_of(key) + lane);
    } else {
      score_tiles<1>(k, steps_, s.q + lane, scores_of(key) + lane);
    }
  }

  /// All of a part's keys, so that P is 0 where a row does not see one.
  static LaneKeys keys_of(const Block<TileMath>& part, const Stripe<TileMath>& s, int vec) {
    if (part.begin >= s.all_begin && part.begin + part.count <= s.all_end) return all_keys(part.count);
    LaneKeys keys = lane_keys(s, part, vec);
    keys.partial |= keys.begin >= keys.end;
    keys.begin = 0;
    keys.end = part.count;
    return keys;
  }

  /// Leaves the products of keys [begin, end) of a block for later.
  void wait_for(const Block<TileMath>& b, const Stripe<TileMath>& s, const float* p, int begin, int end) {
    if (begin >= end) return;
    waiting_ = {.v = b.v + begin / 2 * b.v_stride,
                .v_step = 16 * b.v_stride,
                .p = reinterpret_cast<const std::uint32_t*>(p) + begin / 2 * stripe_lanes,
                .out = s.out,
                .steps = (end - begin + stream_keys - 1) / stream_keys,
                .vecs = s.vecs,
                .next = 0,
                .count = in_tiles(t_.head_dim_v) / 32 * ((s.vecs + 1) / 2)};
  }

  const ForwardTile& t_;
  const Logits& logits_;
  const int steps_;  ///< of 32 columns of Q and K
  float* scores_[2];
  float* p_[2];
  int turn_ = 0;
  WaitingProducts waiting_;
};

}  // namespace tandem::cpu::TANDEM_TARGET

#endif
