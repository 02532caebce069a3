// A block of keys on a processor with a matrix unit: its scores are made and softened 64 keys at a time, so
// that they are still in the first-level cache, and its products with V come at once, so that O, which is
// larger than that cache, is read and written once a block.
#pragma once

#if defined(TANDEM_MATRIX_UNIT)

#include "cpu/forward/softmax.hpp"
#include "cpu/forward/tile_products.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// Keys whose scores of a stripe take 8 KB.
constexpr int stream_keys = 64;

class TileStream {
 public:
  /// `memory`: ForwardScratch::scores.
  TileStream(const ForwardTile& tile, const Logits& logits, float* memory)
      : t_(tile), logits_(logits), scores_(memory), p_(memory + stream_keys * tile_lanes) {}

  /// Whether attend() does anything: not with functions or scales by row.
  static bool streams(const ForwardTile& t) {
    return t.functions == nullptr && t.k_scales.data == nullptr && t.v_scales.data == nullptr;
  }

  /// One block of keys against one stripe; false, and nothing is done, where streams() is.
  bool attend(const Block<TileMath>& b, Stripe<TileMath>& s, Ahead& ahead) {
    if (!streams(t_)) return false;
    // Always from multiples of 64 on, so that a row's bits do not depend on the others of its stripe.
    const int begin =
        b.begin < s.begin ? clamp_to(s.begin - b.begin, b.count) / stream_keys * stream_keys : 0;
    const int end = clamp_to(s.end - b.begin, b.count);
    int done = begin;  // keys before it are in O
    for (int key = begin; key < end; key += stream_keys) {
      const int left = b.count - key;
      const Block<TileMath> part{.begin = b.begin + key,
                                 .count = left < stream_keys ? left : stream_keys,
                                 .k = b.k + key * b.k_stride,
                                 .k_stride = b.k_stride,
                                 .v = nullptr,
                                 .v_stride = 0};
      float* const p = p_ + key / 2 * tile_lanes;
      with_vecs<TileMath>(s.vecs, [&]<int vecs>() {
        score<TileMath, vecs>(part.k, part.k_stride, part.count, s.q, t_.head_dim_qk / 2, scores_, ahead);
      });
      for (int v = 0; v < s.vecs; ++v) {
        soften(s, v, keys_of(part, s, v), logits_, t_.head_dim_v, scores_, p, nullptr, [&] {
          add_products(b, s, done, key);
          done = key;
        });
      }
    }
    add_products(b, s, done, end);
    return true;
  }

 private:
  /// All of a part's keys, so that P is 0 where a row does not see one.
  static LaneKeys keys_of(const Block<TileMath>& part, const Stripe<TileMath>& s, int vec) {
    if (part.begin >= s.all_begin && part.begin + part.count <= s.all_end) return all_keys(part.count);
    LaneKeys keys = lane_keys(s, part, vec);
    keys.partial |= keys.begin != 0 || keys.end != part.count;
    keys.begin = 0;
    keys.end = part.count;
    return keys;
  }

  /// O^T += V^T P^T of keys [begin, end) of a block.
  void add_products(const Block<TileMath>& b, Stripe<TileMath>& s, int begin, int end) {
    if (begin >= end) return;
    with_vecs<TileMath>(s.vecs, [&]<int vecs>() {
      accumulate<TileMath, vecs>(b.v + begin / 2 * b.v_stride, b.v_stride, t_.head_dim_v,
                                 reinterpret_cast<std::uint32_t*>(p_) + begin / 2 * tile_lanes,
                                 (end - begin + 1) / 2, s.out, s.fresh);
    });
    s.fresh = false;
  }

  const ForwardTile& t_;
  const Logits& logits_;
  float* scores_;
  float* p_;
};

}  // namespace tandem::cpu::TANDEM_TARGET

#endif
