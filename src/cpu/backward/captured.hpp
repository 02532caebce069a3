// Gradients of what a score function reads: of each element, the sum over the pairs that read it of
// P * (dP - delta) * d(logit) / d(element).
#pragma once

#include "cpu/backward/function.hpp"
#include "cpu/backward/stage.hpp"
#include "cpu/functions/reads.hpp"

namespace tandem::cpu::TANDEM_TARGET {

/// Half n of panel p against rows [r, r + count) of the key block.
struct CapturedPlace {
  const float* gradients;     ///< d(loss) / d(logit), from key to key panel_lanes apart; 0 where not visible
  const std::uint16_t* seen;  ///< lanes that see each key
  int count;
};

/// Which of an element's indices vary with keys, and the offsets of what does not.
struct ElementOffsets {
  std::int64_t of_lane[vec_lanes] = {};
  std::int64_t of_key[function_keys] = {};
  int of_pairs[ConstTensor::max_rank] = {};  ///< dimensions whose index is a value of pairs
  int pairs = 0;
  bool by_key = false;

  [[gnu::always_inline]] ElementOffsets(const CapturedGradient& to, const FunctionSource* indices,
                                        int count) {
    for (int d = 0; d < to.rank; ++d) {
      if (indices[d].step == 0) {
        add_offsets(load(indices[d].p), to.shape[d], to.stride[d], of_lane);
      } else if (indices[d].broadcast) {
        by_key = true;
        for (int j = 0; j < count; ++j) of_key[j] += offset_of(indices[d].p[j], to.shape[d], to.stride[d]);
      } else {
        of_pairs[pairs++] = d;
      }
    }
  }
};

/// Adds up what one element, or one for each lane, gets from all keys before it is added.
template <typename Sum>
void add_to_rows(const CapturedPlace& at, const FunctionSource& slope, const ElementOffsets& offsets,
                 Sum* to) {
  Vec sum = zero();
  std::uint16_t any = 0;
  for (int j = 0; j < at.count; ++j) {
    const Mask seen = mask_of(at.seen + j);
    sum = hn::Add(sum,
                  hn::IfThenElseZero(seen, hn::Mul(load(at.gradients + j * panel_lanes), fetch(slope, j))));
    any = static_cast<std::uint16_t>(any | at.seen[j]);
  }
  float sums[vec_lanes];
  hn::StoreU(sum, f32_lanes, sums);
  for (int i = 0; i < vec_lanes; ++i) {
    if ((any >> i & 1) != 0) to[offsets.of_lane[i]] += static_cast<Sum>(sums[i]);
  }
}

/// Keys [0, count) whose elements follow one another in memory, as those of a dense bias do: registers of
/// keys for each row. Returns how many keys that were.
template <typename Sum>
int add_to_neighbours(const CapturedPlace& at, const FunctionSource& slope, const ElementOffsets& offsets,
                      Sum* to) {
  for (int j = 1; j < at.count; ++j) {
    if (offsets.of_key[j] != offsets.of_key[0] + j) return 0;
  }
  const int whole = at.count / vec_lanes * vec_lanes;
  for (int first = 0; first < whole; first += vec_lanes) {
    float by_key[vec_lanes * vec_lanes];
    float by_lane[vec_lanes * vec_lanes];
    std::uint16_t any = 0;
    for (int j = 0; j < vec_lanes; ++j) {
      const Vec term = hn::Mul(load(at.gradients + (first + j) * panel_lanes), fetch(slope, first + j));
      store(hn::IfThenElseZero(mask_of(at.seen + first + j), term), by_key + j * vec_lanes);
      any = static_cast<std::uint16_t>(any | at.seen[first + j]);
    }
    transpose(by_key, vec_lanes, vec_lanes, vec_lanes, by_lane, vec_lanes);
    for (int i = 0; i < vec_lanes; ++i) {
      if ((any >> i & 1) == 0) continue;
      Sum* const row = to + offsets.of_lane[i] + offsets.of_key[first];
      for (int j = 0; j < vec_lanes; ++j) row[j] += static_cast<Sum>(by_lane[i * vec_lanes + j]);
    }
  }
  return whole;
}

template <typename Sum>
void add_to_pairs(const CapturedPlace& at, const FunctionSource& slope, const CapturedGradient& gradient,
                  const FunctionSource* indices, const ElementOffsets& offsets, Sum* to) {
  const int start = offsets.pairs == 0 ? add_to_neighbours(at, slope, offsets, to) : 0;
  for (int j = start; j < at.count; ++j) {
    if (at.seen[j] == 0) continue;
    float terms[vec_lanes];
    hn::StoreU(hn::Mul(load(at.gradients + j * panel_lanes), fetch(slope, j)), f32_lanes, terms);
    std::int64_t where[vec_lanes];
    for (int i = 0; i < vec_lanes; ++i) where[i] = offsets.of_lane[i] + offsets.of_key[j];
    for (int n = 0; n < offsets.pairs; ++n) {
      const int d = offsets.of_pairs[n];
      add_offsets(load(indices[d].p + j * indices[d].step), gradient.shape[d], gradient.stride[d], where);
    }
    // Lanes that see nothing may stand for an element that another thread adds to.
    for (int i = 0; i < vec_lanes; ++i) {
      if ((at.seen[j] >> i & 1) != 0) to[where[i]] += static_cast<Sum>(terms[i]);
    }
  }
}

template <typename Sum>
void add_to_elements(const CapturedPlace& at, const FunctionSource& slope, const CapturedGradient& to,
                     const FunctionSource* indices) {
  const ElementOffsets offsets(to, indices, at.count);
  if (offsets.by_key || offsets.pairs > 0) {
    add_to_pairs(at, slope, to, indices, offsets, static_cast<Sum*>(to.data));
  } else {
    add_to_rows(at, slope, offsets, static_cast<Sum*>(to.data));
  }
}

/// Half n of panel p has its scores of rows [r, r + count) in `weight` and dP in `dp`, which becomes the
/// gradient of the logit.
template <typename Tile>
void captured_of_half(Tile& t, std::int64_t p, std::int64_t r, int count, int n) {
  const FunctionProgram& program = *t.b.functions->captured;
  const std::int64_t lane = n * vec_lanes;
  float* const dp = t.at(t.x.dp) + r * panel_lanes + lane;
  float* const memory = t.at(t.x.functions);
  FunctionPlace place = place_of(t, p, n);
  place.first_key = static_cast<std::int32_t>(t.first_key + r);
  place.keys = count;
  place.scores = t.at(t.x.weight) + r * panel_lanes + lane;
  place.score_step = panel_lanes;
  evaluate(program, place, memory);
  const FunctionSource logits = source_of(program.value, place, memory);
  const Vec lse = load(t.at(t.x.lse) + p * panel_lanes + lane);
  const Vec delta = load(t.at(t.x.delta) + p * panel_lanes + lane);
  std::uint16_t* const lanes = t.seen_lanes(p, r, n);
  for (int j = 0; j < count; ++j) {
    const Vec logit = fetch(logits, j);
    const Mask seen = hn::And(mask_of(lanes + j), hn::Ne(logit, broadcast(-__builtin_inff())));
    const Vec power = exp2(hn::Mul(hn::Sub(logit, lse), broadcast(log2_e)));
    Vec change = load(dp + j * panel_lanes);
    if (t.b.shape.dropout) change = kept_times_scale(t, p, r + j, n, change);
    const Vec gradient = hn::Mul(power, hn::Sub(change, delta));
    store(hn::IfThenElseZero(seen, gradient), dp + j * panel_lanes);
    lanes[j] = lane_bits(hn::VecFromMask(i32_lanes, hn::RebindMask(i32_lanes, seen)));
  }
  const CapturedPlace at{.gradients = dp, .seen = lanes, .count = count};
  for (int g = 0; g < program.gradient_count; ++g) {
    const CapturedGradient& to = t.b.captured->of[g];
    if (to.data == nullptr) continue;
    FunctionSource indices[ConstTensor::max_rank] = {};
    for (int d = 0; d < to.rank; ++d) indices[d] = source_of(program.gradients[g].index[d], place, memory);
    const FunctionSource slope = source_of(program.gradients[g].slope, place, memory);
    to.wide ? add_to_elements<double>(at, slope, to, indices)
            : add_to_elements<float>(at, slope, to, indices);
  }
}

/// What the block of queries gives to all that the function reads. Products are computed again: which thread
/// adds to what, and in which order, is then free of how dq, dk and dv are divided.
template <typename Tile>
void add_captured_gradients(Tile& t) {
  const Range keys = t.visible_keys(t.first_query, t.first_query + t.queries - 1);
  const std::int64_t block_k = t.b.shape.block_k;
  for (std::int64_t first = keys.first / block_k * block_k; first < keys.last; first += block_k) {
    if (t.b.stop()) return;
    t.start_key_block(first);
    see_by_functions(t);
    if (!t.masked) continue;
    stage_keys(t);
    for (std::int64_t p = 0; p < t.panels; ++p) {
      const Range strips = t.strips_seen(p);
      if (strips.first >= strips.last) continue;
      products_of_panel(t, p, strips, t.d_qk(), t.x.k_rows, t.x.q_lanes, t.x.weight);
      products_of_panel(t, p, strips, t.d_v(), t.x.v_rows, t.x.dout_lanes, t.x.dp);
      in_function_keys(strips.first * strip_rows, smaller(strips.last * strip_rows, t.keys),
                       [&](std::int64_t r, int count) {
                         scale_and_cap(t, t.at(t.x.weight) + r * panel_lanes, count);
                         find_kept(t, p, r, count);
                         for (int n = 0; n < halves; ++n) captured_of_half(t, p, r, count, n);
                       });
    }
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
