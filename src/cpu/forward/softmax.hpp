// The online softmax of a stripe's scores against one block of keys, register by register: mask, softcap,
// maximum, exponentials.
#pragma once

#include "cpu/forward/stripe.hpp"
#include "cpu/simd/matrix_unit.hpp"

namespace tandem::cpu::TANDEM_TARGET {
/// A row's running maximum is only raised when a block exceeds it by 2^8: rescaling O is rare, p stays below
/// 256.
constexpr float rescale_threshold = 8.0F;

/// `far`: as Base's.
template <bool far>
TANDEM_INLINE Vec exponent(Vec s, const Logits& logits, const Base& base) {
  if constexpr (!HWY_NATIVE_FMA) return hn::Mul(hn::Sub(s, base.raw), broadcast(logits.factor));
  if constexpr (far) s = hn::Sub(s, base.raw);
  return hn::MulSub(s, broadcast(logits.factor), base.scaled);
}

/// Keys of a block that one register's rows see, relative to the block: any of them, and by lane.
struct LaneKeys {
  int begin;
  int end;
  bool partial;  ///< some row does not see all of [begin, end)
  IVec first;
  IVec last;
};

TANDEM_INLINE LaneKeys all_keys(int count) {
  return {0, count, false, hn::Zero(i32_lanes), hn::Zero(i32_lanes)};
}

TANDEM_INLINE int clamp_to(std::int64_t x, int high) {
  return x < 0 ? 0 : (x > high ? high : static_cast<int>(x));
}

template <typename Math>
LaneKeys lane_keys(const Stripe<Math>& s, const Block<Math>& b, int vec) {
  const int lane = vec * vec_lanes;
  const int lanes = s.count - lane < vec_lanes ? s.count - lane : vec_lanes;
  std::int32_t first[vec_lanes];
  std::int32_t last[vec_lanes];
  LaneKeys keys = all_keys(b.count);
  keys.begin = b.count;
  keys.end = 0;
  for (int i = 0; i < vec_lanes; ++i) {
    first[i] = 0;
    last[i] = b.count;
    if (i >= lanes) continue;
    first[i] = clamp_to(s.first_key[lane + i] - b.begin, b.count);
    last[i] = clamp_to(s.last_key[lane + i] - b.begin, b.count);
    if (first[i] >= last[i]) continue;
    if (first[i] < keys.begin) keys.begin = first[i];
    if (last[i] > keys.end) keys.end = last[i];
  }
  // Whole chunks of keys, which are even numbers: segments and pairs of keys stay aligned.
  constexpr int chunk = Math::key_chunk;
  keys.begin = keys.begin / chunk * chunk;
  const int end = (keys.end + chunk - 1) / chunk * chunk;
  keys.end = end < b.count ? end : b.count;
  for (int i = 0; i < vec_lanes; ++i) keys.partial |= first[i] > keys.begin || last[i] < keys.end;
  keys.first = hn::LoadU(i32_lanes, first);
  keys.last = hn::LoadU(i32_lanes, last);
  return keys;
}

/// Softcap, mask and maximum of one register's scores of keys [keys.begin, keys.end), in place.
template <typename Math>
TANDEM_INLINE Vec finish_scores(float* scores, const LaneKeys& keys, const Logits& logits) {
  if (logits.transforms()) {
    for (int j = keys.begin; j < keys.end; ++j) {
      float* s = scores + j * stripe_lanes<Math>;
      store(logits.transform(load(s)), s);
    }
  }
  if (keys.partial) {
    for (int j = keys.begin; j < keys.end; ++j) {
      float* s = scores + j * stripe_lanes<Math>;
      const IVec key = hn::Set(i32_lanes, j);
      const auto seen = hn::AndNot(hn::Lt(key, keys.first), hn::Lt(key, keys.last));
      store(hn::IfThenElse(hn::RebindMask(f32_lanes, seen), load(s), broadcast(negative_infinity)), s);
    }
  }
  // Four chains, since a maximum takes several cycles. A NaN may be lost here: its exponential is NaN all the
  // same.
  Vec maximum[4];
  for (Vec& m : maximum) m = broadcast(negative_infinity);
  int j = keys.begin;
  for (; j + 4 <= keys.end; j += 4) {
    for (int i = 0; i < 4; ++i) maximum[i] = hn::Max(load(scores + (j + i) * stripe_lanes<Math>), maximum[i]);
  }
  for (; j < keys.end; ++j) maximum[0] = hn::Max(load(scores + j * stripe_lanes<Math>), maximum[0]);
  return hn::Max(hn::Max(maximum[0], maximum[1]), hn::Max(maximum[2], maximum[3]));
}

/// Raw products of a segment's keys times the keys' scales.
template <typename Math>
TANDEM_INLINE void scale_scores(float* scores, const Segment& g, const float* k_scales) {
  for (int j = g.begin; j < g.end; ++j) {
    const Vec scale = broadcast(k_scales[j]);
    for (int v = g.first_vec; v < g.last_vec; ++v) {
      float* const s = scores + j * stripe_lanes<Math> + v * vec_lanes;
      store(hn::Mul(load(s), scale), s);
    }
  }
}

#if defined(__AVX512BF16__)
/// Lane i holds bf16(even[i]) in its lower half and bf16(odd[i]) in its upper half. Intel's processors, which
/// have the matrix unit, take four instructions of one step each for it rather than a conversion and a
/// permutation of more. Ties go up; a NaN of bf16's products has its lower half clear, and stays one.
template <typename Math>
TANDEM_INLINE UVec pair_weights(Vec even, Vec odd) {
  if constexpr (!on_tiles<Math>) return pair_bf16(even, odd);
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even.raw), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd.raw), half);
  return UVec{_mm512_mask_blend_epi16(0xAAAAAAAA, low, high)};
}
#endif

#if defined(TANDEM_MATRIX_UNIT)
/// 2^x for weights that become bf16: degree 4 in place of exp2_all()'s 5, minimax on the relative error,
/// 2.9e-6, which is also how far the LSE may be off. That is 2 % of the time on the matrix unit.
constexpr float weight_coefficients[5] = {0.013426682911813259F, 0.052242476493120193F, 0.241280198097229F,
                                          0.6930448412895203F, 1.0F};
#endif

/// Registers of exponentials side by side: pays where exp2_all() was measured, on processors with the matrix
/// unit.
template <typename Math>
constexpr int powers_at_once = has_matrix_unit ? 4 : Math::elements_per_word;

/// Writes the exponentials of scores to `p`, as the operand that Math wants, and returns their sum by lane.
/// `p` may be `scores`. `weighted`: what is written is times v_scales, which their sum is not. `top`: also
/// takes the largest exponents.
template <typename Math, bool far, bool weighted = false>
TANDEM_INLINE Vec exponentiate(const float* scores, int begin, int end, const Logits& logits,
                               const Base& base, float* p, const float* v_scales = nullptr,
                               Vec (*top)[powers_at_once<Math>] = nullptr) {
  const auto weigh = [&](Vec made, int key) {
    if constexpr (weighted) return hn::Mul(made, broadcast(v_scales[key]));
    return made;
  };
  Vec sum = zero();
  // `count` keys from j on, which are pairs or the last one.
  const auto step = [&]<int count>(int j) __attribute__((always_inline)) {
    Vec made[count];
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      made[i] = exponent<far>(load(scores + (j + i) * stripe_lanes<Math>), logits, base);
      if (top != nullptr) (*top)[i] = hn::Max(made[i], (*top)[i]);
    }
#if defined(TANDEM_MATRIX_UNIT)
    if constexpr (on_tiles<Math>) {
      exp2_by(weight_coefficients, made);
    } else {
      exp2_all(made);
    }
#else
    exp2_all(made);
#endif
    if constexpr (Math::elements_per_word == 1) {
#pragma GCC unroll 8
      for (int i = 0; i < count; ++i) {
        store(weigh(made[i], j + i), p + (j + i) * stripe_lanes<Math>);
        sum = hn::Add(sum, made[i]);
      }
    }
#if defined(__AVX512BF16__)
    if constexpr (Math::elements_per_word == 2) {
      // Pair i takes the place of row i, whose scores have been read by then.
      auto* const pairs = reinterpret_cast<std::uint32_t*>(p) + j / 2 * stripe_lanes<Math>;
#pragma GCC unroll 8
      for (int i = 0; i < count; i += 2) {
        const Vec odd = i + 1 < count ? made[i + 1 < count ? i + 1 : i] : zero();
        const Vec odd_weight = i + 1 < count ? weigh(odd, j + i + 1) : odd;
        hn::StoreU(pair_weights<Math>(weigh(made[i], j + i), odd_weight), u32_lanes,
                   pairs + i / 2 * stripe_lanes<Math>);
        sum = hn::Add(sum, hn::Add(made[i], odd));
      }
    }
#endif
  };
  constexpr int most = powers_at_once<Math>;
  int j = begin;
  for (; j + most <= end; j += most) step.template operator()<most>(j);
  if constexpr (most > Math::elements_per_word) {
    constexpr int few = Math::elements_per_word;
    for (; j + few <= end; j += few) step.template operator()<few>(j);
  }
  if constexpr (Math::elements_per_word > 1) {
    if (j < end) step.template operator()<1>(j);
  }
  return sum;
}

/// Out of line: beside the usual loop it costs bf16 5 % of its speed.
template <typename Math>
[[gnu::noinline]] Vec exponentiate_far(const float* scores, int begin, int end, const Logits& logits,
                                       const Base& base, float* p) {
  return exponentiate<Math, true>(scores, begin, end, logits, base, p);
}

/// Out of line as well; right for rows that are far and for others.
template <typename Math>
[[gnu::noinline]] Vec exponentiate_weighted(const float* scores, int begin, int end, const Logits& logits,
                                            const Base& base, float* p, const float* v_scales) {
  return exponentiate<Math, true, true>(scores, begin, end, logits, base, p, v_scales);
}

template <typename Math>
TANDEM_INLINE void rescale_out(float* out, int dims, Vec alpha) {
  for (int c = 0; c < dims; ++c) {
    float* o = out + c * stripe_lanes<Math>;
    store(hn::Mul(load(o), alpha), o);
  }
}

/// The softmax of one register of rows if it needs no new maximum, in one pass over the scores; false, and
/// nothing but `p` is written, if it does or may. A pass for the maximum alone takes a sixth of the softmax.
template <typename Math>
TANDEM_INLINE bool soften_as_before(const Stripe<Math>& s, int lane, const LaneKeys& keys,
                                    const Logits& logits, const float* scores, float* p) {
  if (keys.partial || logits.transforms()) return false;
  const Vec old = load(s.maximum + lane);
  const Base base = base_of(old, logits);
  if (base.far || !hn::AllFalse(f32_lanes, hn::Eq(old, broadcast(negative_infinity)))) return false;
  Vec top[powers_at_once<Math>];
  for (Vec& t : top) t = broadcast(negative_infinity);
  const Vec more =
      exponentiate<Math, false>(scores + lane, keys.begin, keys.end, logits, base, p + lane, nullptr, &top);
  Vec most = top[0];
  for (const Vec& t : top) most = hn::Max(most, t);
  // Below the threshold by more than what rounds the exponents, so that whether a row is rescaled does not
  // depend on the others of its register.
  if (!hn::AllFalse(f32_lanes, hn::Gt(most, broadcast(rescale_threshold - 0.125F)))) return false;
  store(hn::Add(load(s.sum + lane), more), s.sum + lane);
  return true;
}

/// The softmax of one register of rows: scores to exponentials in `p`, which may be `scores`, with maximum,
/// sum and O brought up to date. `v_scales`, by key, may be null. before_rescaling() is called first where O
/// is multiplied.
template <typename Math, typename Before>
[[gnu::noinline]] void soften(const Stripe<Math>& s, int vec, const LaneKeys& keys, const Logits& logits,
                              int dims, float* scores, float* p, const float* v_scales,
                              const Before& before_rescaling) {
  const int lane = vec * vec_lanes;
  if constexpr (on_tiles<Math>) {
    if (v_scales == nullptr && s.largest == nullptr && p != scores &&
        soften_as_before(s, lane, keys, logits, scores, p)) {
      return;
    }
  }
  const Vec old = load(s.maximum + lane);
  const Vec block = finish_scores<Math>(scores + lane, keys, logits);
  if (s.largest != nullptr) store(hn::Max(block, load(s.largest + lane)), s.largest + lane);
  const Vec growth = exponent_between(base_of(block, logits), base_of(old, logits), logits);
  const auto raised = hn::Gt(growth, broadcast(rescale_threshold));
  Vec maximum = old;
  Vec sum = load(s.sum + lane);
  if (!hn::AllFalse(f32_lanes, raised)) {
    maximum = hn::IfThenElse(raised, block, old);
    const Vec alpha = hn::IfThenElse(raised, exp2(hn::Neg(growth)), broadcast(1.0F));
    sum = hn::Mul(sum, alpha);
    const bool fresh = hn::AllTrue(f32_lanes, hn::Eq(old, broadcast(negative_infinity)));
    if (!fresh) {  // a fresh O is 0
      before_rescaling();
      if (!s.fresh) rescale_out<Math>(s.out + lane, dims, alpha);
    }
    store(maximum, s.maximum + lane);
  }
  // A row that has seen nothing but -inf: 2^(-inf - 0) is the 0 that it wants.
  const Vec safe = hn::IfThenZeroElse(hn::Eq(maximum, broadcast(negative_infinity)), maximum);
  const Base base = base_of(safe, logits);
  float* const from = scores + lane;
  float* const to = p + lane;
  const Vec more = v_scales != nullptr
                       ? exponentiate_weighted<Math>(from, keys.begin, keys.end, logits, base, to, v_scales)
                   : base.far ? exponentiate_far<Math>(from, keys.begin, keys.end, logits, base, to)
                              : exponentiate<Math, false>(from, keys.begin, keys.end, logits, base, to);
  store(hn::Add(sum, more), s.sum + lane);
}

/// In place, where O has all keys before.
template <typename Math>
TANDEM_INLINE void soften(const Stripe<Math>& s, int vec, const LaneKeys& keys, const Logits& logits,
                          int dims, float* scores, const float* v_scales) {
  soften(s, vec, keys, logits, dims, scores, scores, v_scales, [] {});
}

/// With a split size: the one segment that all registers of a stripe have whose rows see some key of a block,
/// so that which other rows they share the stripe with does not change how a row's terms are added up. What a
/// row does not see adds zeros. Empty if first_vec == last_vec.
TANDEM_INLINE Segment widen_to_one(LaneKeys* keys, int vecs, int count) {
  Segment g{.begin = count, .end = 0, .first_vec = vecs, .last_vec = 0};
  for (int v = 0; v < vecs; ++v) {
    if (keys[v].begin >= keys[v].end) continue;
    if (keys[v].begin < g.begin) g.begin = keys[v].begin;
    if (keys[v].end > g.end) g.end = keys[v].end;
    if (v < g.first_vec) g.first_vec = v;
    g.last_vec = v + 1;
  }
  if (g.first_vec >= g.last_vec) return {.begin = 0, .end = 0, .first_vec = 0, .last_vec = 0};
  for (int v = g.first_vec; v < g.last_vec; ++v) {
    keys[v].partial |= keys[v].begin != g.begin || keys[v].end != g.end;
    keys[v].begin = g.begin;
    keys[v].end = g.end;
  }
  return g;
}

/// Whether some register of a segment does not see its keys: one between others that do.
TANDEM_INLINE bool have_gaps(const LaneKeys* keys, const Segment* segments, int count) {
  for (int i = 0; i < count; ++i) {
    const Segment& g = segments[i];
    for (int v = g.first_vec; v < g.last_vec; ++v) {
      if (keys[v].begin > g.begin || keys[v].end < g.end) return true;
    }
  }
  return false;
}

/// Cuts a block into segments that the same registers see; at most one for each chunk of keys.
template <typename Math>
TANDEM_INLINE int cut_segments(const LaneKeys* keys, int vecs, int count, Segment* segments) {
  constexpr int chunk = Math::key_chunk;
  int n = 0;
  for (int j = 0; j < count; j += chunk) {
    const int end = j + chunk < count ? j + chunk : count;
    int first = 0;
    while (first < vecs && (j < keys[first].begin || j >= keys[first].end)) ++first;
    int last = vecs;
    while (last > first && (j < keys[last - 1].begin || j >= keys[last - 1].end)) --last;
    if (first == last) continue;
    Segment* const previous = n > 0 ? &segments[n - 1] : nullptr;
    if (previous != nullptr && previous->end == j && previous->first_vec == first &&
        previous->last_vec == last) {
      previous->end = end;
    } else {
      segments[n++] = {.begin = j, .end = end, .first_vec = first, .last_vec = last};
    }
  }
  return n;
}

}  // namespace tandem::cpu::TANDEM_TARGET
